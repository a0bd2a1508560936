"""Packing: what goes into a row comes out of it, and attention over the row is attention over each sequence."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings, strategies as st

import saccade
from looped import looped
from saccade import Causal, Documents, Padding, PerHead, Strided, Window
from saccade.batching import pack, pack_padded, pad, unpack
from slowly import slow_after

WIDTH, HEADS = 5, 2
lengths_of = st.lists(st.integers(0, 11), min_size=1, max_size=7)


def drawn(lengths, *trailing):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(n, *trailing, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]


@given(lengths=lengths_of)
def test_a_row_holds_the_sequences_one_behind_the_other(lengths):
    sequences = drawn(lengths, WIDTH)
    packed = pack(sequences)
    assert torch.equal(packed.row, torch.cat(sequences)[None])
    assert packed.lengths == tuple(lengths)
    assert packed.positions.dtype == torch.int64
    assert packed.positions.tolist() == [[i for n in lengths for i in range(n)]]
    ids = torch.tensor([d for d, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64)
    T = sum(lengths)
    assert torch.equal(packed.documents.dense(T, T)[0, 0], ids[:, None] == ids[None, :])


@given(lengths=lengths_of)
def test_unpack_gives_back_what_went_in(lengths):
    sequences = drawn(lengths, 3, WIDTH)
    packed = pack(sequences)
    for known in (packed, lengths, torch.tensor(lengths)):
        back = unpack(packed.row, known)
        assert all(torch.equal(a, b) for a, b in zip(back, sequences, strict=True))


@given(lengths=lengths_of)
def test_gradients_reach_each_token_once(lengths):
    sequences = drawn(lengths, WIDTH)
    packed = pack(sequences)
    upstream = [torch.randn_like(sequence) for sequence in sequences]
    torch.autograd.backward(unpack(packed.row, packed), upstream)
    assert all(torch.equal(s.grad, u) for s, u in zip(sequences, upstream, strict=True))


@given(lengths=lengths_of, side=st.sampled_from(["right", "left"]))
def test_pack_padded_is_pack_of_the_sequences(lengths, side):
    sequences = drawn(lengths, WIDTH)
    x, padding = pad(sequences, side=side, multiple_of=3, value=float("nan"))
    packed, expected = pack_padded(x, padding), pack(sequences)
    assert torch.equal(packed.row, expected.row)
    assert packed.lengths == expected.lengths
    packed.row.sum().backward()
    assert all(torch.equal(sequence.grad, torch.ones_like(sequence)) for sequence in sequences)


def test_gradients_of_a_padded_batch_are_zero_in_its_padding():
    x = torch.full((2, 3, WIDTH), float("nan"), requires_grad=True)
    pack_padded(x, Padding([1, 2])).row.sum().backward()
    assert x.grad[..., 0].tolist() == [[1, 0, 0], [1, 1, 0]]


MASKS = [
    None,
    Causal(),
    Window(2, 1),
    Causal() & ~Window(0, 0) | Window(1, 0),
    Causal() & Strided(3),
    saccade.Dilated(2) & Window(4, 4),
    PerHead([Causal(), Window(1, 2)]),
]


@pytest.mark.parametrize("mask", slow_after(4, MASKS), ids=repr)
@settings(max_examples=15)
@given(lengths=lengths_of)
def test_attention_over_the_row_is_attention_over_each_sequence(mask, lengths):
    together, alone = drawn(lengths, HEADS, WIDTH), drawn(lengths, HEADS, WIDTH)
    packed = pack(together)
    row = packed.row.transpose(1, 2)
    out = saccade.attention(row, row, row, packed.mask(mask)).transpose(1, 2)
    got = unpack(out, packed)
    for sequence, result in zip(alone, got, strict=True):
        x = sequence.transpose(0, 1).unsqueeze(0)
        expected = saccade.attention(x, x, x, mask)[0].transpose(0, 1)
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
        expected.square().sum().backward()
    out.square().sum().backward()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-11)


@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=5))
def test_cross_attention_from_row_to_row(pairs):
    queries, contexts = drawn([a for a, _ in pairs], HEADS, WIDTH), drawn([b for _, b in pairs], HEADS, WIDTH)
    asking, asked = pack(queries), pack(contexts)
    q, kv = asking.row.transpose(1, 2), asked.row.transpose(1, 2)
    out = saccade.attention(q, kv, kv, asking.mask(keys=asked)).transpose(1, 2)
    for query, context, got in zip(queries, contexts, unpack(out, asking), strict=True):
        one = context.transpose(0, 1).unsqueeze(0)
        expected = saccade.attention(query.transpose(0, 1).unsqueeze(0), one, one)[0].transpose(0, 1)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@looped(
    "mask",
    [
        saccade.Prefix(2),
        saccade.Fixed(3, 1),
        saccade.Chunks(3),
        saccade.Columns(3),
        saccade.Global([0]),
        Padding([3]),
        Causal().at(1),
        Causal().at(0),
        Documents([0, 0, 1]),
        saccade.Predicate(lambda b, h, q, k: k <= q),
        Causal() | saccade.Global([0]),
        ~saccade.Prefix(2),
        PerHead([Causal(), saccade.Prefix(2)]),
    ],
)
def test_masks_that_name_positions_are_refused(mask):
    packed = pack(drawn([3, 2], WIDTH))
    words = f"mask: {mask!r} depends on more than distances, and packing changes the positions of tokens"
    with pytest.raises(ValueError, match=re.escape(words)):
        packed.mask(mask)


def test_a_mask_of_distances_is_the_same_everywhere():
    """What makes it safe in a row: moved by one, every query sees its keys moved by one."""
    L = 13
    for mask in (Causal(), Window(2, 1), Strided(3)):
        dense = mask.dense(L, L)[0, 0]
        assert torch.equal(dense[1:, 1:], dense[:-1, :-1])


@looped(
    ("arguments", "error", "words"),
    [
        ({"mask": torch.ones(5, 5, dtype=torch.bool)}, TypeError, "mask: packed sequences take a Mask or None, got a"),
        ({"keys": torch.zeros(1, 2)}, TypeError, "keys: must be Packed, got a float32 tensor of shape (1, 2)"),
        ({"keys": pack([torch.zeros(2)])}, ValueError, "keys: holds 1 sequences, but the queries' row 2"),
        (
            {"mask": Causal(), "keys": pack([torch.zeros(2)] * 2)},
            ValueError,
            "mask: must be None with keys=, where each sequence has another length, got Causal()",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(arguments, error, words):
    packed = pack(drawn([3, 2], WIDTH))
    with pytest.raises(error, match=re.escape(words)):
        packed.mask(**arguments)


@looped(
    ("row", "packed", "error", "words"),
    [
        (torch.zeros(1, 6, WIDTH), [3, 2], ValueError, "row: expected shape (1, 5, ...), 5 being the lengths' sum"),
        (torch.zeros(2, 5, WIDTH), [3, 2], ValueError, "got (2, 5, 5)"),
        (torch.zeros(5), [3, 2], ValueError, "got (5,)"),
        ([1.0], [1], TypeError, "row: must be a tensor (1, T, ...), got a list"),
        (torch.zeros(1, 5), [3, 2.0], TypeError, "lengths must be an int or ints (B,)"),
        (torch.zeros(1, 5), [6, -1], ValueError, "lengths must be at least 0, got -1"),
        (torch.zeros(1, 5), 5, TypeError, "packed: must be Packed, or one length for each sequence, got 5 (int)"),
    ],
)
def test_unpack_refuses_what_does_not_fit(row, packed, error, words):
    with pytest.raises(error, match=re.escape(words)):
        unpack(row, packed)


def test_pack_refuses_what_pad_refuses():
    with pytest.raises(ValueError, match="sequences: got none"):
        pack([])
    with pytest.raises(ValueError, match=re.escape("sequences[1]: expected shape (length, 5)")):
        pack([torch.zeros(2, 5), torch.zeros(2, 7)])
