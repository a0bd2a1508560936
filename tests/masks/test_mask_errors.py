"""Every refusal names what came and what was expected."""

from __future__ import annotations

import re

import pytest
import torch

from looped import looped
from saccade import ALiBi, attention
from saccade.nn.cache import StaticLayer, WindowLayer
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
    Padding,
    PerHead,
    Predicate,
    Prefix,
    RandomBlocks,
    Strided,
    Window,
    as_mask,
)

BITS = torch.ones(5, 7, dtype=torch.bool)

BUILDING = [
    (ValueError, "left must be at least 0, got -1", lambda: Window(-1, 2)),
    (ValueError, "right must be at least 0, got -3", lambda: Window(2, -3)),
    (TypeError, "left must be an int, got 1.5 (float)", lambda: Window(1.5, 2)),
    (TypeError, "right must be an int, got True (bool)", lambda: Window(1, True)),
    (TypeError, "lengths (B,) of integers or booleans (B, L), got a float32 tensor", lambda: Padding(torch.ones(3))),
    (TypeError, "uint8 is neither", lambda: Padding(torch.full((3, 5), 2, dtype=torch.uint8))),
    (TypeError, "got 3 (int)", lambda: Padding(3)),
    (ValueError, "bool tensor of shape (3,)", lambda: Padding([True, False, True])),
    (ValueError, "int64 tensor of shape (1, 2)", lambda: Padding([[1, 2]])),
    (ValueError, "negative length, -1", lambda: Padding([3, -1])),
    (ValueError, "negative length, -2", lambda: Padding([3], queries=[-2])),
    (ValueError, "masks made for 2 and for 3 batch items", lambda: Padding([3, 1], queries=[1, 2, 3])),
    (TypeError, "query_ids must be integers (L,) or (B, L), got a bool tensor", lambda: Documents([True, False])),
    (TypeError, "key_ids must be integers", lambda: Documents([1, 2], torch.ones(2))),
    (ValueError, "got a int64 tensor of shape (1, 1, 2)", lambda: Documents([[[1, 2]]])),
    (ValueError, "start at 0 and never fall, got [1, 3]", lambda: Documents.from_cu_seqlens([1, 3])),
    (ValueError, "never fall", lambda: Documents.from_cu_seqlens([0, 3, 2])),
    (ValueError, "1 documents, key_cu_seqlens 2", lambda: Documents.from_cu_seqlens([0, 3], [0, 2, 5])),
    (ValueError, "length must be at least 0, got -2", lambda: Prefix([1, -2])),
    (ValueError, "ints (B,), got shape (1, 1)", lambda: Prefix([[1]])),
    (TypeError, "got 3 (int)", lambda: Global(3)),
    (ValueError, "negative position, -1", lambda: Global([2, -1])),
    (ValueError, "positions (T,) of integers", lambda: Global([[1, 2]])),
    (ValueError, "stride must be at least 1, got 0", lambda: Strided(0)),
    (ValueError, "columns must be at most stride 3, got 4", lambda: Fixed(3, 4)),
    (ValueError, "Dilated: step must be at least 1, got 0", lambda: Dilated(0)),
    (TypeError, "Dilated: step", lambda: Dilated(2.0)),
    (ValueError, "Chunks: size must be at least 1, got 0", lambda: Chunks(0)),
    (ValueError, "Chunks: left must be at least 0, got -1", lambda: Chunks(2, -1)),
    (ValueError, "Chunks: right must be at least 0, got -2", lambda: Chunks(2, 0, -2)),
    (ValueError, "Columns: stride must be at least 1, got 0", lambda: Columns(0)),
    (ValueError, "Columns: columns must be at most stride 3, got 4", lambda: Columns(3, 4)),
    (TypeError, "booleans (nq, nk) or (H, nq, nk), got a int64", lambda: Blocks([[1, 0]], 4)),
    (ValueError, "got a bool tensor of shape (2,)", lambda: Blocks([True, False], 4)),
    (ValueError, "size must be at least 1, got 0", lambda: Blocks([[True]], 0)),
    (ValueError, "count must be at least 0", lambda: RandomBlocks(1, 2, -1)),
    (TypeError, "symmetric must be a bool", lambda: RandomBlocks(1, 2, 1, symmetric=1)),
    (ValueError, "of one length, got (2,) and (1,)", lambda: Edges([1, 2], [1])),
    (ValueError, "must not be negative", lambda: Edges([1, 2], [1, -1])),
    (TypeError, "queries must be integers (E,)", lambda: Edges([1.0], [1])),
    (TypeError, "PerHead: masks must be a list of masks", lambda: PerHead([Causal(), BITS])),
    (TypeError, "PerHead: masks must be a list of masks, got a Causal", lambda: PerHead(Causal())),
    (ValueError, "at least one mask", lambda: PerHead([])),
    (ValueError, "for 3 and for 2 heads", lambda: PerHead([PerHead([Causal(), Causal()])] * 3)),
    (TypeError, "additive scores go into bias=", lambda: FromTensor(torch.zeros(5, 7))),
    (TypeError, "convert it with .bool()", lambda: FromTensor(torch.ones(5, 7, dtype=torch.uint8))),
    (
        ValueError,
        "told apart; write mask[:, None] for a mask of each batch item",
        lambda: FromTensor(torch.ones(2, 5, 7, dtype=torch.bool)),
    ),
    (TypeError, "fn must be a function of (b, h, q, k)", lambda: Predicate(3)),
    (ValueError, "heads must be at least 1", lambda: Predicate(lambda b, h, q, k: k <= q, heads=0)),
    (TypeError, "fn must take the 4 arguments (b, h, q, k), got a function of (q)", lambda: Predicate(lambda q: q)),
    (TypeError, "bias=", lambda: as_mask(torch.zeros(5, 7))),
    (TypeError, "write Causal(...)", lambda: as_mask(Causal)),
    (TypeError, "must be a Mask, a bool tensor or None, got 'causal' (str)", lambda: as_mask("causal")),
]

COMBINING = [
    (TypeError, "wrap the tensor, FromTensor(tensor)", lambda: Causal() & BITS),
    (TypeError, "wrap the tensor, FromTensor(tensor)", lambda: BITS | Causal()),
    (TypeError, "a mask combines with masks", lambda: Causal() | None),
    (TypeError, "& | ~", lambda: Causal() and Window(1, 1)),
    (TypeError, "& | ~", lambda: not Causal()),
    (ValueError, "2 and for 3 batch items", lambda: Padding([1, 2]) & Padding([1, 2, 3])),
    (ValueError, "2 and for 3 heads", lambda: PerHead([Causal()] * 2) | PerHead([Causal()] * 3)),
    (ValueError, "placed already", lambda: Causal().at(1).at(2)),
    (ValueError, "placed already", lambda: (Causal().at(1) & Padding([3])).at(1)),
    (ValueError, "placed already", lambda: (~Causal().at(1)).at(1)),
    (ValueError, "placed already", lambda: Causal().slice((0, 1), (0, 1), lengths=(2, 2)).at(0)),
    (ValueError, "place the whole expression, (a & b).at(n)", lambda: Causal().at(1) & Window(1, 1)),
    (ValueError, "place the whole expression", lambda: PerHead([Causal().at(1), Window(1, 1)])),
    (ValueError, "different positions", lambda: Causal().at(1) & Window(1, 1).at(2)),
    (ValueError, "different positions", lambda: cut((0, 3), (0, 4)) & cut((1, 4), (0, 4))),
    (ValueError, "place the whole expression", lambda: cut((0, 3), (0, 4)) & Causal()),
    (TypeError, "offset must be an int", lambda: Causal().at(True)),
    (TypeError, "offset must be an int or ints (B,), got a float32", lambda: Causal().at(torch.zeros(2))),
    (ValueError, "ints (B,), got shape (1, 2)", lambda: Causal().at([[1, 2]])),
    (ValueError, "3 and for 2 batch items", lambda: (Causal() & Padding([1, 2])).at([1, 2, 3])),
    (ValueError, "give lengths=(Lq, Lk)", lambda: Causal().slice((0, 1), (0, 1))),
    (ValueError, "rows 0:6 leaves the problem, which has 5 rows", lambda: cut((0, 6), (0, 4))),
    (ValueError, "keys -1:4 leaves the problem", lambda: cut((0, 3), (-1, 4))),
    (ValueError, "must have step 1", lambda: cut(slice(0, 4, 2), (0, 4))),
    (TypeError, "slice, a range or (start, stop), got 3 (int)", lambda: cut(3, (0, 4))),
    (ValueError, "relative to a length", lambda: Padding([3]).slice(slice(None), slice(0, 2))),
    (
        ValueError,
        "lengths (9, 9) are not those of this slice, (3, 4)",
        lambda: cut((0, 3), (0, 4)).slice((0, 1), (0, 1), lengths=(9, 9)),
    ),
]

FITTING = [
    ("a length of 8 keys is beyond the 7 keys there are", Padding([3, 8])),
    ("a length of 6 queries is beyond the 5 queries", Padding([3, 7], queries=[6, 1])),
    ("booleans (B, L) for 6 keys, but there are 7 keys", Padding(torch.ones(2, 6, dtype=torch.bool))),
    ("made for a batch of 3, the query has a batch of 2", Padding([3, 4, 5])),
    ("made for a batch of 3", Causal().at([1, 2, 3])),
    ("made for 2 heads, the query has 3 heads", PerHead([Causal(), Window(1, 1)])),
    ("made for 2 heads", Blocks(torch.ones(2, 9, 9, dtype=torch.bool), 1)),
    ("6 ids, but queries and keys reach position 6", Causal() & Documents([0] * 6)),
    ("8 ids, but queries and keys reach position 9", Documents([0] * 8).at([1, 5])),
    ("5 query_ids and 6 key_ids for 5 queries and 7 keys", Documents([0] * 5, [0] * 6)),
    ("6 booleans, but queries and keys reach position 6", Global([True] * 6)),
    ("the layout covers 6 keys, there are 7", ~Blocks(torch.ones(9, 3, dtype=torch.bool), 2)),
    ("the layout covers 6 positions, the queries reach 6", Blocks(torch.ones(3, 9, dtype=torch.bool), 2)),
    ("a mask of shape (7, 5) for 5 queries and 7 keys, expected (Lq, Lk) or (B, H, Lq, Lk)", FromTensor(BITS.T)),
    ("for the real keys of each batch item (B, Lk) write saccade.Padding(mask)", FromTensor(BITS[:2])),
    ("a mask of shape (2, 1, 7, 5)", FromTensor(torch.ones(2, 1, 7, 5, dtype=torch.bool))),
    ("a slice of (3, 4) queries and keys cannot stand in a problem of (5, 7)", Padding([3]).slice((0, 3), (0, 4))),
    ("a slice of (3, 4)", ~Padding([3]).slice((0, 3), (0, 4)) & Padding([2])),
    ("Padding is on device cpu, the query on meta: use mask.to('meta')", Causal() & Padding(torch.tensor([3, 4]))),
]

FAR = 2**53 + 1
TOO_FAR = [
    ("Window: left", lambda far: Window(far, 0)),
    ("Window: right", lambda far: Window(None, far)),
    ("Prefix: length", lambda far: Prefix(far)),
    ("Prefix: length", lambda far: Prefix([3, far])),
    ("Strided: stride", lambda far: Strided(far)),
    ("Fixed: stride", lambda far: Fixed(far)),
    ("Fixed: columns", lambda far: Fixed(3, far)),
    ("Dilated: step", lambda far: Dilated(far)),
    ("Chunks: size", lambda far: Chunks(far)),
    ("Chunks: left", lambda far: Chunks(3, far)),
    ("Chunks: right", lambda far: Chunks(3, 0, far)),
    ("Columns: stride", lambda far: Columns(far)),
    ("Columns: columns", lambda far: Columns(3, far)),
    ("Blocks: size", lambda far: Blocks([[True]], far)),
    ("RandomBlocks: size", lambda far: RandomBlocks(0, far, 1)),
    ("RandomBlocks: count", lambda far: RandomBlocks(0, 1, far)),
    ("Padding: keys", lambda far: Padding([3, far])),
    ("Padding: queries", lambda far: Padding([3], queries=[far])),
    ("Documents: cu_seqlens", lambda far: Documents.from_cu_seqlens([0, far])),
    ("Global: tokens", lambda far: Global([far])),
    ("Edges: queries", lambda far: Edges([far], [0])),
    ("Edges: keys", lambda far: Edges([0], [far])),
    ("rows", lambda far: Causal().at(0).slice((0, far), (0, 4))),
    ("keys", lambda far: Causal().at(0).slice((0, 3), (0, far))),
    ("Lq", lambda far: Causal().slice((0, 3), (0, 4), lengths=(far, far))),
    ("Lk", lambda far: Causal().tile((0, 3), (0, 4), 5, far)),
    ("Lq", lambda far: Causal().picture(far, 5)),
    ("window", lambda far: WindowLayer(far)),
    ("capacity", lambda far: StaticLayer(far)),
]
# Places that may lie before 0 as well.
PLACED = [
    ("offset", lambda far: Causal().at(far)),
    ("offset", lambda far: Causal().at([0, far])),
    ("bias.at: offset", lambda far: ALiBi(torch.ones(2)).at(far)),
    ("bias.at: offset", lambda far: ALiBi(torch.ones(2)).at([far, 0])),
]


def cut(rows, keys):
    return Causal().slice(rows, keys, lengths=(5, 7))


def check(error, words, call):
    with pytest.raises(error, match=re.escape(words)):
        call()


@looped(("error", "words", "call"), BUILDING)
def test_building(error, words, call):
    check(error, words, call)


@looped(("error", "words", "call"), COMBINING)
def test_combining(error, words, call):
    check(error, words, call)


@looped(("words", "mask"), FITTING)
def test_fitting(words, mask):
    device = torch.device("meta" if "meta" in words else "cpu")
    check(ValueError, words, lambda: mask.check(2, 3, 5, 7, device))


@looped("far", [FAR, 2**63 - 1, 2**63, 10**30])
@looped(("name", "make"), TOO_FAR + PLACED)
def test_positions_and_lengths_have_one_bound(name, make, far):
    check(ValueError, f"{name} must lie between -2**53 and 2**53, got {far}", lambda: make(far))


@looped("far", [-FAR, -(2**63), -(2**63) - 1])
@looped(("name", "make"), PLACED)
def test_positions_before_0_have_the_same_bound(name, make, far):
    check(ValueError, f"{name} must lie between -2**53 and 2**53, got {far}", lambda: make(far))


@looped("far", [-FAR, FAR, -(2**63), 2**63 - 1])
def test_tensors_have_the_bound_of_ints(far):
    numbers = torch.tensor([far, 0])
    check(ValueError, f"offset must lie between -2**53 and 2**53, got {far}", lambda: Causal().at(numbers))
    if far > 0:
        check(ValueError, f"length must lie between -2**53 and 2**53, got {far}", lambda: Prefix(numbers))
        check(ValueError, f"keys must lie between -2**53 and 2**53, got {far}", lambda: Padding(numbers))


def test_the_bound_itself_is_allowed():
    for place in (2**53, -(2**53)):
        assert Causal().at(place) == Causal().at(place) != Causal().at(torch.tensor([place, 0]))
    for make in (Dilated, Strided, Chunks, Prefix, lambda n: Window(n, n), lambda n: Padding([n, 0])):
        assert "9007199254740992" in repr(make(2**53))
    for make in (lambda n: Global([0, n]), lambda n: Edges([n], [0]), lambda n: Edges([0], [n])):
        assert "9007199254740992" in repr(make(2**53))


def test_what_fits_is_not_refused():
    for mask in (
        Padding([3, 7], queries=[5, 0]),
        Padding([7]),
        Documents([0] * 11),
        Documents([[0] * 5, [1] * 5], [0] * 7),
        Global([100]),
        Edges([100], [100]),
        Causal().at([-3, 20]),
        FromTensor(torch.ones(2, 1, 1, 7, dtype=torch.bool)),
        Padding([[True] * 7]).slice((0, 5), (0, 7)),
        FromTensor(torch.ones(9, 11, dtype=torch.bool)).slice((1, 6), (2, 9)),
    ):
        assert mask.check(2, 3, 5, 7, torch.device("cpu")) is None


def test_a_slice_is_only_for_its_own_sizes():
    mask = cut((1, 4), (2, 6))
    for call in (
        lambda: mask.dense(5, 7),
        lambda: mask.tile((0, 1), (0, 1), 5, 7),
        lambda: mask.kind((0, 1), (0, 1), 5, 7),
        lambda: (~mask)._grid(torch.arange(1), torch.arange(1), 5, 7),
    ):
        check(ValueError, "a slice of (3, 4)", call)


@looped(
    ("name", "fn"),
    [
        ("h", lambda b, h, q, k: k <= q + h),
        ("b", lambda b, h, q, k: torch.tensor([3, 4])[b % 2] > k),
        ("h", lambda b, h, q, k: torch.where(h == 0, k <= q, k >= q)),
        ("b", lambda b, h, q, k: torch.maximum(q, b) > k),
        ("b", lambda b, h, q, k: (k <= q) & b.bool()),
    ],
)
def test_a_predicate_must_declare_what_it_tells_apart(name, fn):
    check(ValueError, f"fn uses {name}; say how many there are", lambda: Predicate(fn).dense(3, 5))


def test_a_predicate_reads_no_item_or_head_that_a_table_lacks():
    rows, spans = torch.zeros(1, 7, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    by_item, by_head = (lambda b, h, q, k: rows[b, q] == rows[b, k]), (lambda b, h, q, k: q - k < spans[h])
    query = torch.zeros(3, 5, 7, 2)
    few = "fn reads a tensor with 1 of the 3 batch items"
    check(IndexError, few, lambda: attention(query, query, query, Predicate(by_item)))
    check(IndexError, few, lambda: attention(query, query, query, (Causal() & Predicate(by_item)).at(0)))
    few = "fn reads a tensor with 1 of the 5 query heads"
    check(IndexError, few, lambda: attention(query, query, query, Predicate(by_head)))


def test_a_predicate_that_needs_values_in_python_names_the_operators():
    check(TypeError, "use torch.where, &, |, ~", lambda: Predicate(lambda b, h, q, k: 0 <= q - k < 5).dense(3, 5))


def test_a_predicate_must_answer_with_booleans():
    check(TypeError, "must return a bool tensor, got a int64", lambda: Predicate(lambda b, h, q, k: k - q).dense(3, 5))
    check(TypeError, "must return a bool tensor, got True", lambda: Predicate(lambda b, h, q, k: True).dense(3, 5))
