"""The kernels' masks against `mask.dense`: bits of rows, kinds of rectangles, and the work lists, pair by pair.

Kinds are 0 empty, 1 partial, 2 full. B batch items, H heads, Lq / Lk lengths; a grain is a block's rows or keys.
"""

from __future__ import annotations

import copy
import gc
import pickle
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import saccade
from looped import looped
from masks import mask_sets
from saccade.operator._backends.native import _lowering
from saccade.operator._backends.native._lowering import MaskProgram, Opcode, built, is_structured, lower, native_mask
from saccade.operator._masks import (
    Blocks,
    Causal,
    Chunks,
    Columns,
    Dilated,
    Documents,
    Edges,
    Fixed,
    FromTensor,
    Global,
    Mask,
    Padding,
    PerHead,
    Predicate,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
)

native = pytest.importorskip("saccade._native")

EMPTY, PARTIAL, FULL = 0, 1, 2
LQ, LK = 197, 211


def seeded(*shape, density=0.5):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(len(shape))) < density


def unpacked(words, count):
    """Bits of (..., words) as booleans (..., count); all bits beyond are 0."""
    found = np.unpackbits(np.asarray(words, dtype=np.uint64).view(np.uint8), axis=-1, bitorder="little")
    assert not found[..., count:].any()
    return found[..., :count].astype(bool)


def row_of(made, b, h, row, start, count):
    return unpacked(made.row_bits(b, h, row, start, count), count)


def block_of(made, b, h, rows, start, count):
    words = np.asarray(made.block_bits(b, h, rows, start, count), dtype=np.uint64).reshape(-1, -(-count // 64) + 1)
    assert (words[:, -1] == 2**64 - 1).all()  # what lies between two rows belongs to somebody else
    return unpacked(np.ascontiguousarray(words[:, :-1]), count)


def kinds(bits, grains):
    """Of each block of (Lq, Lk) booleans."""
    cut = [
        [bits[q : q + grains[0], k : k + grains[1]] for k in range(0, bits.shape[1], grains[1])]
        for q in range(0, bits.shape[0], grains[0])
    ]
    return np.array([[EMPTY if not t.any() else FULL if t.all() else PARTIAL for t in row] for row in cut])


def listed(made, b, h, lengths, grains, transposed=False):
    """The work list as a table of kinds: what is not listed is empty."""
    along, other = (1, 0) if transposed else (0, 1)
    blocks = [-(-length // grain) for length, grain in zip(lengths, grains, strict=True)]
    table = np.zeros((blocks[along], blocks[other]), dtype=int)
    for n in range(blocks[along]):
        block = (n * grains[along], min((n + 1) * grains[along], lengths[along]))
        end, kind = 0, None
        for first, last, full in native.pieces(made, lengths, grains, (b, h), block, transposed):
            assert end <= first < last <= blocks[other]
            assert first > end or kind != full or first == 0, "neighbours of one kind are one piece"
            table[n, first:last] = FULL if full else PARTIAL
            end, kind = last, full
    return table.T if transposed else table


def check(mask: Mask, Lq: int, Lk: int, grains=((3, 2),), exact=False):
    made = built(lower(mask, Lq, Lk), Lq, Lk)
    batch, heads = mask._batch_and_heads()
    assert made.batch in (1, batch) and made.heads in (1, heads) and (made.length_q, made.length_k) == (Lq, Lk)
    dense = mask.dense(Lq, Lk).expand(batch, heads, Lq, Lk).numpy()
    for b, h in np.ndindex(batch, heads):
        check_bits(made, b, h, dense[b, h])
        for grain in grains:
            check_blocks(made, b, h, dense[b, h], grain, exact)


def check_bits(made, b, h, dense):
    Lq, Lk = dense.shape
    for start in {0, Lk // 3, max(Lk - 65, 0)} if Lk else ():
        count = Lk - start
        assert (block_of(made, b, h, (0, Lq), start, count) == dense[:, start:]).all()
        for row in range(0, Lq, 1 + Lq // 31):
            assert (row_of(made, b, h, row, start, count) == dense[row, start:]).all()


def check_blocks(made, b, h, dense, grains, exact):
    true = kinds(dense, grains).reshape(-(-dense.shape[0] // grains[0]), -(-dense.shape[1] // grains[1]))
    by_rows = listed(made, b, h, dense.shape, grains)
    by_keys = listed(made, b, h, dense.shape, grains, transposed=True)
    for table in (by_rows, by_keys):
        assert ((table == true) | (table == PARTIAL)).all()
        assert not exact or (table == true).all()
    assert (by_rows == by_keys).all()
    for q, k in np.ndindex(true.shape):
        rows, keys = (q * grains[0], (q + 1) * grains[0]), (k * grains[1], (k + 1) * grains[1])
        assert made.kind(b, h, rows, keys) in (true[q, k], PARTIAL)
        assert not exact or made.kind(b, h, rows, keys) == true[q, k]
    for q in range(true.shape[0]):
        within(
            np.nonzero(dense[q * grains[0] : (q + 1) * grains[0]].any(0))[0],
            made.keys_of(b, h, (q * grains[0], (q + 1) * grains[0])),
        )
    for k in range(true.shape[1]):
        within(
            np.nonzero(dense[:, k * grains[1] : (k + 1) * grains[1]].any(1))[0],
            made.rows_of(b, h, (k * grains[1], (k + 1) * grains[1])),
        )


def within(found, hull):
    assert all(hull[0] <= index < hull[1] for index in found)


@settings(max_examples=70, deadline=None)
@given(mask_sets.problems(depth=2), st.integers(1, 6), st.integers(1, 6))
def test_any_expression(problem, row_grain, key_grain):
    case, Lq, Lk = problem
    check(case.mask, Lq, Lk, [(row_grain, key_grain)])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slices_of_any_expression(data):
    case, Lq, Lk = data.draw(mask_sets.problems(depth=1))
    rows, keys = data.draw(mask_sets.spans(Lq)), data.draw(mask_sets.spans(Lk))
    part = case.mask.slice(rows, keys, lengths=(Lq, Lk))
    check(part, rows[1] - rows[0], keys[1] - keys[0], [(2, 3)])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_lengths_of_each_item_cut_any_expression(data):
    Lq, Lk = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 13))
    mask = mask_sets.composition(data.draw, Lq, Lk, 1).mask & mask_sets.padding(data.draw, Lq, Lk).mask
    check(mask, Lq, Lk, [(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))])


DIAGONALS = seeded(1, 400, density=0.1)


def opaque(fn):
    """A function that cannot be traced, and so is asked for each pair."""
    return lambda b, h, q, k: fn(b, h, q, k) & (torch.special.i0(q.double()) > 0)


LARGE = {
    "causal": Causal(),
    "not causal": ~Causal(),
    "top left": Causal().at(0),
    "moved": Causal().at([-3, 70, 14]),
    "window": Window(30, 7),
    "causal window": Causal() & Window(67, None),
    "before": Causal().at(-LQ - 5),
    "prefix": Prefix(101),
    "prefixes": Prefix([0, 64, 190]),
    "strided": Strided(61),
    "strided, close": Strided(3),
    "fixed": Fixed(53, 7),
    "fixed, close": Fixed(4, 1),
    "dilated": Dilated(2),
    "dilated, far": Dilated(61),
    "dilated window": Window(90, 45) & Dilated(3),
    "dilated, moved": (Causal() & Dilated(5)).at([-3, 70]),
    "chunks": Chunks(53),
    "chunks, close": Causal() & Chunks(5),
    "chunks, far and near": Chunks(11, 3, 2),
    "chunks, before": Chunks(48).at(-100),
    "columns": Columns(53, 7),
    "columns, close": Causal() & Columns(4),
    "global": Global([0, 63, 64, 65, 190]),
    "global, by item": Global(seeded(3, 250, density=0.05)),
    "longformer": Window(20, 20) | Global([0, 1, 100]),
    "bigbird": Window(20, 20) | Global([0]) | RandomBlocks(7, 16, 2),
    "random": RandomBlocks(3, 11, 3),
    "random, both ways": RandomBlocks(3, 11, 3, symmetric=True),
    "random, moved": RandomBlocks(3, 11, 3, symmetric=True).at([40, 3]),
    "blocks": Blocks(seeded(2, 9, 9), 29),
    "edges": Edges(torch.arange(500) * 7 % LQ, torch.arange(500) * 11 % LK),
    "documents": Documents([0] * 50 + [4] * 70 + [2] * 17 + [5] * 80),
    "documents by item": Causal() & Documents([[0] * 50 + [1] * 170, [3] * 110 + [4] * 110]),
    "documents in pieces": Documents((torch.arange(230) // 30) % 3),
    "documents all over": Documents((torch.arange(230) * 5 // 3) % 7),
    "two sequences": Documents(torch.arange(LQ) // 41, torch.arange(LK) // 37),
    "padding": Padding([LK, 0, 101], [LQ, 57, 190]),
    "padding, left": Padding(torch.arange(LK) >= torch.tensor([[0], [77], [LK]])),
    "padding, holes": Causal() & Padding(seeded(3, LK, density=0.9), seeded(3, LQ, density=0.9)),
    "tensor": FromTensor(seeded(2, 3, LQ, LK)),
    "tensor, by key": FromTensor(seeded(1, 2, 1, LK)),
    "tensor, by row": FromTensor(seeded(3, 1, LQ, 1)),
    "tensor in a window": FromTensor(seeded(LQ, LK)) & Window(25, 0),
    "dilations": PerHead([Window(30, 30), Window(60, 60) & Dilated(2), Window(90, 0) & Dilated(3)]) | Global([3, 90]),
    "heads": PerHead([Window(16, 0), Causal(), Window(16, 0) | Global([3])]),
    "sliced": (Causal() & Padding([300, 150])).slice((64, 64 + LQ), (30, 30 + LK), lengths=(300, 300)),
    "sliced, placed": Window(90, 0).at(11).slice((64, 64 + LQ), (30, 30 + LK)),
    "either padding": Causal() & (Padding([100, 30]) | Padding([7, 90])),
    "predicate": Predicate(lambda b, h, q, k: (q * k + b) % (h + 3) == 0, batch=2, heads=3),
    "predicate, untraced": Predicate(opaque(lambda b, h, q, k: (q * k + b) % (h + 3) == 0), batch=2, heads=3),
    "predicate in a window, untraced": Predicate(opaque(lambda b, h, q, k: (q + k) % 3 == 0)) & Window(40, 0),
    "predicate in a window": Predicate(lambda b, h, q, k: (q + k) % 3 == 0) & Window(40, 0),
    "predicate, sliced": Predicate(lambda b, h, q, k: (q + 2 * k) % 5 == 0).slice(
        (64, 64 + LQ), (30, 30 + LK), lengths=(300, 310)
    ),
    "predicate, moved": (Causal() & ~Predicate(lambda b, h, q, k: (q * 3 + k) % 7 == 0)).at([5, 90]),
}


@looped("name", LARGE)
def test_over_many_words_and_blocks(name):
    check(LARGE[name], LQ, LK, [(48, 48), (16, 96)])


@looped(
    "name",
    [
        "causal",
        "moved",
        "window",
        "causal window",
        "prefixes",
        "random",
        "blocks",
        "edges",
        "padding",
        "padding, left",
        "tensor",
        "two sequences",
        "global",
        "dilated, far",
        "chunks",
        "chunks, far and near",
        "columns",
    ],
)
def test_lists_of_these_are_exact(name):
    check(LARGE[name], LQ, LK, [(48, 48), (7, 5)], exact=True)


# Each rule in Python's own ints, which know no overflow.
FAR_AWAY = [
    (Causal(), lambda p, j: j <= p),
    (Window(2**53, 2**53 - 3), lambda p, j: -(2**53) <= j - p <= 2**53 - 3),
    (Prefix(5), lambda p, j: j < 5 or j <= p),
    (Strided(3), lambda p, j: p - j >= 0 and (p - j <= 3 or (p - j) % 3 == 0)),
    (Strided(2**53), lambda p, j: p - j >= 0 and (p - j <= 2**53 or (p - j) % 2**53 == 0)),
    (Fixed(7, 2), lambda p, j: j <= p and (j // 7 == p // 7 or j % 7 >= 5)),
    (Dilated(2), lambda p, j: (j - p) % 2 == 0),
    (Dilated(2**53), lambda p, j: (j - p) % 2**53 == 0),
    (Chunks(3, 2**53, 1), lambda p, j: -(2**53) <= j // 3 - p // 3 <= 1),
    (Chunks(2**53, 1, 2**53), lambda p, j: -1 <= j // 2**53 - p // 2**53 <= 2**53),
    (Causal() & ~Columns(5, 2), lambda p, j: j <= p and j % 5 < 3),
]


@looped("place", [2**53, 2**53 - 10, -(2**53), -(2**53) + 1, 2**53 // 3])
@looped("mask, rule", FAR_AWAY)
def test_as_far_away_as_a_query_can_stand(mask, rule, place):
    places = [place, 0, -place]
    expected = np.array([[[rule(i + at, j) for j in range(19)] for i in range(17)] for at in places])
    moved = mask.at(places)
    assert (moved.dense(17, 19)[:, 0].numpy() == expected).all()
    check(moved, 17, 19, [(4, 6)])


@looped("symmetric", [False, True])
@looped("size, count", [(1, 3), (4, 2), (3, 40), (2, 0)])
def test_random_blocks_of_items_that_stand_far_apart(size, count, symmetric):
    """Time and memory of the rows and keys there are: before, a list for every block between them."""
    mask = RandomBlocks(5, size, count, symmetric=symmetric).at([2**53 - 20, 0, 9, 10**8, -(2**53), 7])
    check(mask, 17, 31, [(4, 6)])


def test_random_blocks_of_a_far_query_draw_only_among_the_keys_there_are():
    mask = RandomBlocks(5, 1, 10**9).at(10**10)
    made = built(lower(mask, 3, 200), 3, 200)
    bits = block_of(made, 0, 0, (0, 3), 0, 200)
    kinds_of_pairs = [[mask.kind((i, i + 1), (j, j + 1), 3, 200) for j in range(200)] for i in range(3)]
    assert (bits == (np.array(kinds_of_pairs) == "full")).all()
    assert bits.sum(1).tolist() == pytest.approx([20, 20, 20], abs=1)  # one in each ten of the blocks before


def test_drawing_blocks_can_be_interrupted():
    def alarm(*_):
        raise InterruptedError

    mask = RandomBlocks(5, 1, 2**20, symmetric=True).at([0, 2**20])
    before = signal.signal(signal.SIGALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError):
            built(lower(mask, 1, 2**20), 1, 2**20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_patch_of_a_predicate_is_as_large_as_memory_allows(monkeypatch):
    monkeypatch.setattr(_lowering, "_PATCH", 1)
    for name in ("predicate, untraced", "predicate in a window, untraced"):
        check(LARGE[name], LQ, LK, [(48, 48)])


def test_a_predicate_is_asked_only_where_its_answer_matters():
    asked = []

    def near(b, h, q, k):
        asked.append(torch.broadcast_shapes(q.shape, k.shape).numel())
        return (q + k) % 3 == 0

    length = 4096
    program, tensors = lower(Causal() & Window(100, None) & Predicate(opaque(near)), length, length)
    assert sum(asked) < length * length / 4
    held = tensors[-1]
    assert held.shape[1] == 64 and len(held) == 3, "the pattern repeats: its tiles are kept once"
    assert Opcode.TILES in program


def test_a_list_of_every_block_is_one_piece():
    length = 131072
    made = native_mask(Causal(), length, length)
    last = (length - 64, length)
    count = length // 64
    assert native.pieces(made, (length, length), (64, 64), (0, 0), last, False) == [
        (0, count - 1, True),
        (count - 1, count, False),
    ]
    assert native.pieces(made, (length, length), (64, 64), (0, 0), (0, 64), True) == [(0, 1, False), (1, count, True)]
    assert native.pieces(None, (length, length), (64, 64), (0, 0), last, False) == [(0, count, True)]


def test_nothing_sees_nothing():
    for Lq, Lk in ((0, 0), (0, 5), (5, 0)):
        made = native_mask(Causal() & Padding([0]), Lq, Lk)
        assert made.kind(0, 0, (0, Lq), (0, Lk)) == EMPTY
        assert native.pieces(None, (Lq, Lk), (2, 2), (0, 0), (0, min(Lq, 2)), False) in ([], [(0, 3, True)])
        assert made.keys_of(0, 0, (0, Lq)) == (0, 0)


@looped(
    "mask, number",
    [
        (Causal() & Padding(list(range(17))), 1),
        (Causal() & Padding(torch.arange(LK) >= torch.arange(17)[:, None]), 1),
        ((Causal() & Padding([3, 2, 5])).at([7, 11, 7]), 2),
        (Causal() | Padding([3, 2, 3]), 2),
        (PerHead([Window(3, 0), Causal(), Window(3, 0)]) & Padding([3, 5]), 2),
        (Prefix([3, 5, 3, 5, 5]), 2),
        (FromTensor(seeded(2, 3, LQ, LK)), 6),
    ],
)
def test_items_and_heads_that_see_the_same_share_a_list(mask, number):
    """Lengths of each item are a clip and no list of their own."""
    assert built(lower(mask, LQ, LK), LQ, LK).distinct_lists(48, 48) == number


def test_the_object_is_remembered():
    mask = Causal() & Padding([3, 5])
    first = native_mask(mask, 5, 7)
    assert native_mask(mask, 5, 7) is first
    other = native_mask(mask, 7, 7)
    assert other is not first and other.length_q == 7


@looped("mask", [Padding([3, 5]), Causal(), FromTensor(seeded(5, 7)), Documents([0] * 7), Causal() & Padding([3, 5])])
def test_a_copy_does_not_carry_the_object(mask):
    native_mask(mask, 5, 7)
    copies = [copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))]
    assert all(other == mask and other._remembered("native", (5, 7)) is None for other in copies)
    if type(mask) is not Causal:
        meta = mask.replaced()
        assert meta._remembered("native", (5, 7)) is None


def test_not_remembered_where_a_mode_looks_on():
    from torch._subclasses.fake_tensor import FakeTensorMode

    mask = Causal() & Padding([3, 5])
    with FakeTensorMode():
        seen = native_mask(mask, 5, 7)
    assert mask._remembered("native", (5, 7)) is None
    assert seen.kind(0, 0, (0, 5), (5, 7)) == EMPTY


def test_the_object_outlives_its_mask():
    bits = seeded(LQ, LK)
    made = native_mask(FromTensor(bits), LQ, LK)
    gc.collect()
    torch.empty(LQ * LK, dtype=torch.bool).fill_(True)
    assert (block_of(made, 0, 0, (0, LQ), 0, LK) == bits.numpy()).all()


def test_tables_are_read_as_they_lie():
    """int32 as well as int64, and any strides."""
    wide = seeded(2, LK, 3, LQ)
    made = built(MaskProgram([Opcode.TENSOR, 0], [wide.permute(0, 2, 3, 1)]), LQ, LK)
    assert (block_of(made, 1, 2, (0, LQ), 0, LK) == wide.numpy()[1, :, 2].T).all()
    ids = (torch.arange(2 * LK) // 31).int()
    made = built(MaskProgram([Opcode.DOCUMENTS, 0, -1], [ids[::2]]), LK, LK)
    assert (block_of(made, 0, 0, (0, LK), 0, LK) == (ids[::2, None] == ids[None, ::2]).numpy()).all()
    made = built(MaskProgram([Opcode.PADDING, 0, -1], [torch.tensor([7, 0, 3, 0, 5, 0]).int()[::2]]), LQ, LK)
    assert [made.keys_of(b, 0, (0, 1)) for b in range(3)] == [(0, 7), (0, 3), (0, 5)]


@looped("mask", LARGE.values())
def test_only_predicates_are_worked_out(mask):
    program, tensors = lower(mask, LQ, LK)
    assert is_structured(mask) == ("Predicate" not in repr(mask))
    if is_structured(mask):
        again = lower(mask, LQ, LK)
        assert program == again.program and all(one is other for one, other in zip(tensors, again.tensors, strict=True))
        held = sum(tensor.numel() for tensor in tensors if tensor.dim() < 4)
        assert held < 20 * (LQ + LK), "no table of pairs but one that was given"


class Odd(Mask):
    """A mask of a class that the lowering does not know."""

    def allows(self, b, h, row, position, key):
        return (position + key) % 2 == 1

    def region_kind(self, region):
        return "partial"

    def _value(self):
        return ()


def test_a_mask_of_another_class_is_worked_out():
    check(Odd(), LQ, LK, [(48, 48)])
    check(Causal() & ~Odd(), LQ, LK, [(48, 48)])
    assert not is_structured(Causal() & ~Odd())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "prefixes",
        "longformer",
        "random, moved",
        "blocks",
        "edges",
        "documents by item",
        "padding, holes",
        "tensor",
        "heads",
        "sliced",
        "either padding",
    ],
)
def test_a_compiled_graph_carries_it(name):
    mask = LARGE[name]
    batch, heads = mask._batch_and_heads()
    query, key, value = (torch.rand(batch, heads, length, 8) for length in (LQ, LK, LK))
    torch._dynamo.reset()
    attend = torch.compile(partial(saccade.attention, mask=mask, backend="native"), backend="aot_eager", fullgraph=True)
    expected = saccade.attention(query.double(), key.double(), value.double(), mask, backend="reference")
    torch.testing.assert_close(attend(query, key, value).double(), expected, atol=2e-6, rtol=0)


def test_lists_built_by_several_threads_at_once():
    mask = PerHead([Window(n, 0) | Global([n]) for n in range(5)]) & Padding(seeded(3, LK, density=0.9))
    dense = mask.dense(LQ, LK).numpy()
    for _ in range(20):
        made = built(lower(mask, LQ, LK), LQ, LK)
        start = threading.Barrier(4)

        def prepare(made=made, start=start):
            start.wait()
            made.prepare(48, 48)

        threads = [threading.Thread(target=prepare) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_blocks(made, 2, 4, dense[2, 4], (48, 48), exact=False)


@looped(
    "program, tensors, message",
    [
        ([], [], "it ends too early"),
        ([Opcode.WINDOW, 1], [], "it ends too early"),
        ([99], [], "no such operation"),
        ([Opcode.WINDOW, 1, 1, 1], [], "numbers are left over"),
        ([Opcode.PADDING, 0, -1], [], "no such table"),
        ([Opcode.PADDING, 0, -1], [torch.zeros(2, 3, dtype=torch.int64)], "another number of axes"),
        ([Opcode.TENSOR, 0], [torch.zeros(1, 1, 2, 2, dtype=torch.int64)], "another dtype"),
        ([Opcode.STRIDED, 0], [], "a number is too small"),
        ([Opcode.DILATED, 0], [], "a number is too small"),
        ([Opcode.CHUNKS, 3, -1, 0], [], "a number is too small"),
        ([Opcode.COLUMNS, 3, 4], [], "more columns than the stride"),
        ([Opcode.DOCUMENTS, 0, -1], [torch.zeros(6, dtype=torch.int64)], "fewer ids than keys"),
        ([Opcode.TENSOR, 0], [torch.zeros(1, 1, 4, 7, dtype=torch.bool)], "fewer rows"),
        (
            [Opcode.ALL, 2, Opcode.PREFIX, 1, 0, Opcode.PREFIX, 1, 1],
            [torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)],
            "different numbers of items",
        ),
        ([Opcode.HEADS, 1, 2, 0, 1, Opcode.WINDOW, 1, 1], [], "no such part"),
    ],
)
def test_what_is_no_program_is_refused(program, tensors, message):
    with pytest.raises(ValueError, match=message):
        built(MaskProgram(program, tensors), 5, 7)
