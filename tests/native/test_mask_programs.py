"""Masks from functions: what they are recognised as, what is known of their tiles, and what the kernels get.

The meaning of a function is PyTorch's: `vmap` over items, heads, queries and keys.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

import saccade
from native.test_mask_engine import block_of
from saccade.operator._backends.native._lowering import built, lower, native_mask, traced_tiles
from saccade.operator._masks import Predicate
from saccade.operator._masks._program import ProgramScope

B, H, LQ, LK = 2, 3, 67, 139
document = torch.arange(LK) // 23
scattered = torch.arange(LK) * 7 % 5
packed = torch.stack([document, torch.arange(LK) // 31 - 3])
lengths = torch.tensor([29, 131])
widths = torch.tensor([3, 17, 90])
flags = torch.arange(LK) % 37 < 5
speed = torch.linspace(-2, 2, LK)


def meaning(fn, rows=LQ, keys=LK):
    with TransformGetItemToIndex():
        bits = _vmap_for_bhqkv(fn, prefix=())(*map(torch.arange, (B, H, rows, keys)))
    return bits.expand(B, H, rows, keys)


def lowered(mask, rows=LQ, keys=LK):
    made = built(lower(mask, rows, keys), rows, keys)
    bits = [[block_of(made, b, h, (0, rows), 0, keys) for h in range(H)] for b in range(B)]
    return torch.from_numpy(np.array(bits))


RECOGNISED = [
    (lambda b, h, q, k: q >= k, "Causal()"),
    (lambda b, h, q, k: q > k, "~Window(0, None)"),
    (lambda b, h, q, k: (q >= k) & (q - k <= 4) & (k - q > -9), "Window(4, 0)"),
    (lambda b, h, q, k: (q - k).abs() < 5, "Window(4, 4)"),
    (lambda b, h, q, k: ~((k - q).abs() > 5), "Window(5, 5)"),
    (lambda b, h, q, k: (q >= k) | (k < 7), "Prefix(7)"),
    (lambda b, h, q, k: (k <= q) | (k < lengths[b]), "Prefix([29, 131])"),
    (lambda b, h, q, k: (document[q] == document[k]) & (q >= k), "Causal() & Documents(<139 int>)"),
    (lambda b, h, q, k: packed[b, q] == packed[b][k], "Documents(<2 x 139 int>)"),
    (lambda b, h, q, k: document[q] != document[k], "~Documents(<139 int>)"),
    (lambda b, h, q, k: k < lengths[b], "Padding([29, 131])"),
    (lambda b, h, q, k: (k <= lengths[b]) & (q >= k), "Causal() & Padding([30, 132])"),
    (lambda b, h, q, k: (k < 2) | (q < 2) | ((q - k).abs() <= 1), "Global([0, 1]) | Window(1, 1)"),
    (lambda b, h, q, k: flags[q] | flags[k], "Global(<20 int>)"),
    (lambda b, h, q, k: flags[k] & (scattered[k] > 1), "Padding(<1 x 139 bool>)"),
    (lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k), "Causal() & Dilated(3)"),
    (lambda b, h, q, k: q // 16 == k // 16, "Chunks(16, 0, 0)"),
    (lambda b, h, q, k: (q // 16 - k // 16).abs() <= 1, "Chunks(16, 1, 1)"),
    (lambda b, h, q, k: (q >= k) & (q - k <= widths[h]), "PerHead([Window(3, 0), Window(17, 0), Window(90, 0)])"),
    (lambda b, h, q, k: (q - k) % (h + 2) == 0, "PerHead([Dilated(2), Dilated(3), Dilated(4)])"),
    (lambda b, h, q, k: (q >= k) ^ (k < 3), "(Causal() & ~Padding([3])) | (~Causal() & Padding([3]))"),
    (lambda b, h, q, k: b.new_ones((), dtype=torch.bool), "Window(None, None)"),
]


@pytest.mark.parametrize("fn, name", RECOGNISED)
def test_functions_of_known_masks_are_lowered_as_these(fn, name):
    mask = Predicate(fn, batch=B, heads=H)
    known = mask._program().recognised(LK)
    assert repr(known).replace("Chunks(16)", "Chunks(16, 0, 0)") == name
    assert lower(mask.at(0), LQ, LK).program == lower(known.at(0), LQ, LK).program
    assert torch.equal(lowered(mask.at(0)), meaning(fn))


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: k % 3 <= q % 3,
        lambda b, h, q, k: (q - k) % 3 == 1,
        lambda b, h, q, k: document[q] == scattered[k],
        lambda b, h, q, k: document[q] == document[k + 0 * b] + 1,
        lambda b, h, q, k: 2 * q >= k,
        lambda b, h, q, k: (q - k) * 0.5 <= 3,
        lambda b, h, q, k: lengths[b] > q,
        lambda b, h, q, k: q // 16 == k // 8,
        lambda b, h, q, k: (q >= k) | (k > 7 * q),
        lambda b, h, q, k: q - k <= 2**60,
    ],
)
def test_what_only_looks_like_a_known_mask_is_not_taken_for_it(fn):
    mask = Predicate(fn, batch=B, heads=H)
    assert mask._program().recognised(LK) is None
    assert torch.equal(lowered(mask.at(0)), meaning(fn))


# --- any program ----------------------------------------------------------------------------------------------------

INTS = st.recursive(
    st.sampled_from(
        "q k q k q k b h document[q] document[k] scattered[q] scattered[k] packed[b,k] packed[b][q] lengths[b] "
        "widths[h] 0 1 5 17 64 100".split()
    ),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+ - * & |".split()), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from("// %".split()), st.sampled_from((1, 2, 3, 16, 64))),
        st.builds("torch.as_tensor({}).abs()".format, inner),
        st.builds("(-{})".format, inner),
        st.builds(
            "torch.{}(torch.as_tensor({}), torch.as_tensor({}))".format,
            st.sampled_from(["maximum", "minimum"]),
            inner,
            inner,
        ),
    ),
    max_leaves=5,
)
FLOATS = st.one_of(
    st.sampled_from(["speed[q]", "speed[k]", "0.5"]),
    st.builds("torch.as_tensor({}).float().{}()".format, INTS, st.sampled_from("sqrt log sin exp tanh abs".split())),
    st.builds("({} * {})".format, INTS, st.sampled_from((0.5, 0.1, -1.5))),
    st.builds("({} / {})".format, INTS, INTS),
    st.builds("torch.maximum(torch.as_tensor({}).float().sqrt(), speed[q])".format, INTS),
)
COMPARED = st.sampled_from("< <= > >= == !=".split())
BOOLS = st.recursive(
    st.one_of(
        st.builds("(torch.as_tensor({}) {} {})".format, INTS, COMPARED, INTS),
        st.builds("(torch.as_tensor({}) {} {})".format, FLOATS, COMPARED, st.one_of(FLOATS, INTS)),
        st.sampled_from(["flags[q]", "flags[k]", "(q >= k)", "((q - k).abs() <= 20)", "(q % 64 == k % 64)"]),
    ),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("& | ^".split()), inner),
        st.builds("(~{})".format, inner),
        st.builds("torch.where({}, {}, {})".format, inner, inner, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=25)
@given(BOOLS)
def test_tiles_of_any_program_are_those_of_its_pairs(text):
    fn = eval(f"lambda b, h, q, k: {text}", globals())
    want = meaning(fn)
    mask = Predicate(fn, batch=B, heads=H).at(0)
    made = mask.part._program()
    assert made is not None, text
    assert torch.equal(mask.dense(LQ, LK).expand_as(want), want)
    for rows in ((0, 1), (3, 64), (64, LQ)):
        for keys in ((0, 64), (64, 65), (65, 128), (128, LK)):
            bits = want[:, :, slice(*rows), slice(*keys)]
            assert mask.kind(rows, keys, LQ, LK) in (
                "partial",
                "full" if bits.all() else "partial" if bits.any() else "empty",
            )
    assert torch.equal(lowered(mask), want)
    which, tiles = traced_tiles(made, ProgramScope((0, LQ), (0, LK), 0, made))
    assert torch.equal(torch.from_numpy(_of_tiles(which, tiles)).expand_as(want), want), "without being recognised"


def _of_tiles(which, tiles):
    bits = np.unpackbits(tiles.view(np.uint8).reshape(-1, 64, 8), axis=2, bitorder="little").astype(bool)
    held = np.concatenate([bits, np.ones((1, 64, 64), bool), np.zeros((1, 64, 64), bool)])  # -2: full, -1: empty
    return held[which].transpose(0, 1, 2, 4, 3, 5).reshape(*which.shape[:2], which.shape[2] * 64, -1)[..., :LQ, :LK]


def test_empty_tiles_of_a_function_are_not_looked_at(monkeypatch):
    """A neighbourhood in two dimensions, which no mask of Saccade is: only tiles at its edges are worked out."""
    width, length = 32, 2048
    mask = Predicate(lambda b, h, q, k: ((q // width - k // width).abs() <= 2) & ((q % width - k % width).abs() <= 2))
    made, pairs = mask._program(), []
    allows = type(made).allows
    monkeypatch.setattr(type(made), "allows", lambda *a: pairs.append(a[4].numel() * 64) or allows(*a))
    lower(mask, length, length)
    assert 0 < sum(pairs) <= 2 * 32 * 4 * 64 * 64, "at most four tiles beside each other in each of 32 rows of tiles"


# --- captured tensors -----------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_tables():
    mask = Predicate(lambda b, h, q, k: (k < lengths[b]) & (q - k < widths[h]))
    assert mask._batch_and_heads() == (B, H)
    query = torch.randn(B, H, LQ, 8)
    with pytest.raises(ValueError, match="made for a batch of 2, the query has a batch of 5"):
        saccade.attention(
            query.repeat(3, 1, 1, 1)[:5], query.repeat(3, 1, 1, 1)[:5], query.repeat(3, 1, 1, 1)[:5], mask
        )


@pytest.mark.parametrize("write", ["in place", "data", "numpy"])
@pytest.mark.parametrize("backend", ["native", "chunked"])
def test_changes_of_a_captured_tensor_are_noticed(write, backend):
    ids = document[:LQ].clone()
    mask = Predicate(lambda b, h, q, k: ids[q] == ids[k]) & saccade.Causal()
    query, key, value = torch.randn(3, 1, 2, LQ, 8, generator=torch.Generator().manual_seed(0))
    for shift in (0, 11, 29):
        changed = (torch.arange(LQ) + shift) // 23
        if write == "in place":
            ids.copy_(changed)
        elif write == "data":
            ids.data[:] = changed
        else:
            ids.numpy()[:] = changed.numpy()
        got = saccade.attention(query, key, value, mask, backend=backend)
        want = saccade.attention(query, key, value, saccade.Documents(changed) & saccade.Causal(), backend=backend)
        assert torch.equal(got, want)


def test_a_mask_is_lowered_once_while_nothing_changes():
    ids = document.clone()
    mask = Predicate(lambda b, h, q, k: ids[q] == ids[k])
    first = native_mask(mask, LK, LK)
    assert native_mask(mask, LK, LK) is first
    ids[3] = 5
    assert native_mask(mask, LK, LK) is not first


def test_an_index_outside_of_a_captured_tensor_is_an_error():
    short = torch.arange(LQ)
    mask = Predicate(lambda b, h, q, k: short[q] * 2 >= short[k])
    with pytest.raises(
        IndexError, match=r"index 138 is out of bounds for axis 0 of captured tensor 0, of shape \(67,\)"
    ):
        mask.at(0).dense(LQ, LK)


def test_a_function_that_cannot_be_traced_works_pair_by_pair():
    mask = Predicate(lambda b, h, q, k: torch.erf((q - k).double()) < 0.5)
    assert mask._program() is None and mask.kind((0, 1), (0, 1), LQ, LQ) == "partial"
    assert torch.equal(lowered_square(mask), torch.ones(LQ, LQ).triu())


def lowered_square(mask):
    made = built(lower(mask, LQ, LQ), LQ, LQ)
    return torch.from_numpy(block_of(made, 0, 0, (0, LQ), 0, LQ)).float()
