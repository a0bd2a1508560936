"""Padding against PyTorch's `pad_sequence`, and back to what went in."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pad_sequence

import saccade
from looped import looped
from saccade.batching import fill_padding, pad, positions_of, unpad
from slowly import diagonal

WIDTH = 5
lengths_of = st.lists(st.integers(0, 11), min_size=1, max_size=7)
sides = st.sampled_from(["right", "left"])


def drawn(lengths, *trailing, dtype=torch.float64):
    generator = torch.Generator().manual_seed(len(lengths))
    made = [torch.randn(n, *trailing, generator=generator, dtype=torch.float64).mul(100).to(dtype) for n in lengths]
    return [sequence.requires_grad_() if dtype.is_floating_point else sequence for sequence in made]


@pytest.mark.parametrize(
    ("trailing", "dtype"),
    diagonal([(), (WIDTH,), (3, WIDTH)], [torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool]),
)
@given(lengths=lengths_of, side=sides)
def test_equals_pad_sequence(trailing, dtype, lengths, side):
    sequences = drawn(lengths, *trailing, dtype=dtype)
    x, _ = pad(sequences, side=side, value=1)
    expected = pad_sequence(sequences, batch_first=True, padding_value=1, padding_side=side)
    assert x.dtype == dtype
    assert torch.equal(x, expected)


@given(lengths=lengths_of, side=sides, multiple_of=st.integers(1, 8))
def test_the_mask_says_which_tokens_are_real(lengths, side, multiple_of):
    x, padding = pad(drawn(lengths, WIDTH), side=side, multiple_of=multiple_of, value=float("nan"))
    real = ~x[..., 0].isnan()
    B, L = real.shape
    assert L % multiple_of == 0
    assert max(lengths) <= L < max(lengths) + multiple_of
    assert torch.equal(padding.dense(L, L), (real[:, :, None] & real[:, None, :]).view(B, 1, L, L))


@given(lengths=lengths_of, side=sides, multiple_of=st.integers(1, 8))
def test_unpad_gives_back_what_went_in(lengths, side, multiple_of):
    sequences = drawn(lengths, WIDTH)
    x, padding = pad(sequences, side=side, multiple_of=multiple_of, value=float("nan"))
    back = unpad(x, padding)
    assert [len(sequence) for sequence in back] == lengths
    assert all(torch.equal(a, b) for a, b in zip(back, sequences, strict=True))


@given(lengths=lengths_of, side=sides)
def test_gradients_reach_each_token_once_and_the_padding_never(lengths, side):
    sequences = drawn(lengths, WIDTH)
    x, padding = pad(sequences, side=side, multiple_of=3)
    leaf = x.detach().clone().requires_grad_()
    upstream = [torch.randn_like(sequence) for sequence in sequences]
    for source in (x, leaf):
        torch.autograd.backward(unpad(source, padding), upstream)
    assert all(torch.equal(s.grad, u) for s, u in zip(sequences, upstream, strict=True))
    assert torch.equal(leaf.grad, pad(upstream, side=side, multiple_of=3)[0])


def test_derivatives_of_every_order():
    sequences = drawn([3, 0, 2], WIDTH)
    for side in ("right", "left"):
        assert torch.autograd.gradcheck(
            lambda *s, side=side: unpad(pad(s, side=side)[0] ** 2, pad(s, side=side)[1])[2], sequences
        )
        assert torch.autograd.gradgradcheck(lambda *s, side=side: pad(s, side=side)[0] ** 3, sequences)


def test_the_kind_of_mask_is_that_of_the_side():
    sequences = drawn([2, 3], WIDTH)
    assert pad(sequences)[1] == saccade.Padding([2, 3], queries=[2, 3])
    left = [[False, True, True], [True, True, True]]
    assert pad(sequences, side="left")[1] == saccade.Padding(left, queries=left)


def test_padding_may_have_holes_and_may_speak_of_keys_only():
    x = torch.arange(14).view(2, 7)
    real = [[True, False, True, True, False, False, True], [False] * 7]
    assert [row.tolist() for row in unpad(x, saccade.Padding(real))] == [[0, 2, 3, 6], []]
    by_queries = saccade.Padding([7, 7], queries=[1, 2])
    assert [row.tolist() for row in unpad(x, by_queries)] == [[0], [7, 8]]


def test_empty_sequences_give_empty_rows():
    x, padding = pad([torch.zeros(0, WIDTH)] * 3, multiple_of=4)
    assert x.shape == (3, 0, WIDTH)
    assert padding.dense(0, 0).shape == (3, 1, 0, 0)
    assert [row.shape for row in unpad(x, padding)] == [(0, WIDTH)] * 3
    x, padding = pad([torch.zeros(0, WIDTH)] * 3, side="left")
    assert [row.shape for row in unpad(x, padding)] == [(0, WIDTH)] * 3


@given(lengths=lengths_of, side=sides, multiple_of=st.integers(1, 8))
def test_positions_count_the_real_tokens_before(lengths, side, multiple_of):
    x, padding = pad(drawn(lengths), side=side, multiple_of=multiple_of)
    positions = positions_of(padding, x.shape[1])
    assert positions.dtype == torch.int64
    assert positions.shape == x.shape
    assert (positions >= 0).all()
    assert [row.tolist() for row in unpad(positions, padding)] == [list(range(n)) for n in lengths]


@given(lengths=lengths_of, side=sides, trailing=st.sampled_from([(), (WIDTH,), (3, WIDTH)]))
def test_filled_padding_holds_the_value_and_gets_no_gradient(lengths, side, trailing):
    sequences = drawn(lengths, *trailing)
    x, padding = pad(sequences, side=side, multiple_of=3, value=float("nan"))
    filled = fill_padding(x, padding, 7)
    assert torch.equal(filled, pad(sequences, side=side, multiple_of=3, value=7)[0])
    leaf = x.detach().requires_grad_()
    fill_padding(leaf, padding).backward(torch.full_like(x, float("nan")).where(x.isnan(), 1.0))
    assert torch.equal(leaf.grad, (~x.isnan()).double())


def test_ids_are_filled_too():
    assert fill_padding(torch.tensor([[5, 6], [7, 8]]), saccade.Padding([1, 2]), -100).tolist() == [[5, -100], [7, 8]]
    with pytest.raises(ValueError, match="x: has 1 rows, but padding is of 2; got shape \\(1, 2\\)"):
        fill_padding(torch.zeros(1, 2), saccade.Padding([1, 2]))


def test_a_padded_row_of_attention_equals_the_sequence_alone():
    """One definition of both sides: NaN in the padding reaches nothing, and padded rows are 0."""
    heads = 2
    sequences = drawn([7, 1, 5], heads, WIDTH)
    for side in ("right", "left"):
        x, padding = pad(sequences, side=side, value=float("nan"))
        q = x.transpose(1, 2)
        out = saccade.attention(q, q, q, saccade.Causal() & padding).transpose(1, 2)
        assert out.isfinite().all()
        for row, sequence in zip(unpad(out, padding), sequences, strict=True):
            alone = sequence.transpose(0, 1).unsqueeze(0)
            expected = saccade.attention(alone, alone, alone, saccade.Causal())[0].transpose(0, 1)
            # Both are within rounding of the same mathematics; values are about 100 in float64.
            torch.testing.assert_close(row, expected, rtol=1e-12, atol=1e-10)


GOOD = torch.zeros(3, WIDTH)
BAD_SEQUENCES = [
    (GOOD, TypeError, "sequences: must be a list of tensors (L_i, ...), got a float32 tensor of shape (3, 5)"),
    ({"a": GOOD}, TypeError, "sequences: must be a list of tensors (L_i, ...), got a dict"),
    ([], ValueError, "sequences: got none, so neither width nor dtype is known; at least one is needed"),
    ([GOOD, [1.0]], TypeError, "sequences[1]: must be a tensor (L_i, ...), got a list"),
    ([GOOD, torch.tensor(1.0)], ValueError, "sequences[1]: must be a tensor (L_i, ...), got a single number"),
    (
        [GOOD, torch.zeros(3, 7)],
        ValueError,
        "sequences[1]: expected shape (length, 5) as in sequences[0], got shape (3, 7)",
    ),
    ([torch.zeros(2), GOOD], ValueError, "sequences[1]: expected shape (length) as in sequences[0], got shape (3, 5)"),
    (
        [GOOD, GOOD.double()],
        TypeError,
        "sequences[1]: expected torch.float32 as in sequences[0], got torch.float64",
    ),
    ([GOOD, GOOD.to("meta")], ValueError, "sequences[1]: expected to be on cpu as sequences[0], got meta"),
]


@looped(("sequences", "error", "words"), BAD_SEQUENCES)
def test_sequences_that_do_not_fit_are_refused(sequences, error, words):
    with pytest.raises(error) as caught:
        pad(sequences)
    assert str(caught.value) == words


@looped(
    ("options", "words"),
    [
        ({"side": "both"}, "side: must be one of 'right', 'left', got 'both'"),
        ({"multiple_of": 0}, "multiple_of must be at least 1, got 0"),
        ({"value": 0.5}, "value: 0.5 (float) is not a value of torch.int8, the dtype of the sequences"),
        ({"value": -100.0 * 2}, "value: -200.0 (float) is not a value of torch.int8"),
        ({"value": 300}, "value: 300 (int) is not a value of torch.int8"),
        ({"value": float("nan")}, "value: nan (float) is not a value of torch.int8"),
        ({"value": "0"}, "value: '0' (str) is not a value of torch.int8"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        pad([torch.zeros(3, dtype=torch.int8)], **options)


def test_targets_take_the_value_that_the_loss_ignores():
    x, _ = pad([torch.tensor([7]), torch.tensor([8, 9])], value=-100)
    assert x.tolist() == [[7, -100], [8, 9]]


@looped(
    ("x", "padding", "error", "words"),
    [
        (torch.zeros(2, 3), [3, 3], TypeError, "padding: must be a saccade.Padding, got a list"),
        (torch.zeros(3), saccade.Padding([3]), TypeError, "x: must be a padded tensor (B, L, ...), got a float32"),
        (
            torch.zeros(2, 3),
            saccade.Padding([3, 1, 2]),
            ValueError,
            "x: has 2 rows, but padding is of 3; got shape (2, 3)",
        ),
        (
            torch.zeros(2, 3),
            saccade.Padding([4, 1]),
            ValueError,
            "x: rows have 3 tokens, but padding has a length of 4",
        ),
        (
            torch.zeros(1, 3),
            saccade.Padding([[True, False]]),
            ValueError,
            "x: rows have 3 tokens, but padding has booleans for 2",
        ),
    ],
)
def test_unpad_refuses_what_does_not_fit(x, padding, error, words):
    with pytest.raises(error, match=re.escape(words)):
        unpad(x, padding)


def test_positions_of_refuses_another_length():
    with pytest.raises(ValueError, match="length: rows have 2 tokens, but padding has a length of 3"):
        positions_of(saccade.Padding([3]), 2)
    with pytest.raises(TypeError, match="padding: must be a saccade.Padding, got 3 \\(int\\)"):
        positions_of(3, 2)
