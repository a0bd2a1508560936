"""PyTorch's nested tensors to a row and back."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from hypothesis import given, strategies as st

from saccade.batching import nested_like, packed_nested

WIDTH = 5
lengths_of = st.lists(st.integers(0, 11), min_size=1, max_size=7)


def drawn(lengths, *trailing):
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randn(n, *trailing, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]


def jagged(sequences):
    return torch.nested.as_nested_tensor(sequences, layout=torch.jagged)


@pytest.mark.parametrize("trailing", [(), (WIDTH,), (3, WIDTH)])
@given(lengths=lengths_of)
def test_there_and_back_with_gradients(trailing, lengths):
    sequences = drawn(lengths, *trailing)
    nested = jagged(sequences)
    packed = packed_nested(nested)
    assert torch.equal(packed.row, torch.cat(sequences)[None])
    assert packed.lengths == tuple(lengths)
    back = nested_like(packed.row**2, nested)
    assert back.shape == nested.shape  # the same ragged size: they can be added
    for got, sequence in zip((back + nested).unbind(), sequences, strict=True):
        assert torch.equal(got, sequence**2 + sequence)
    back.values().sum().backward()
    assert all(torch.equal(sequence.grad, 2 * sequence) for sequence in sequences)


def test_a_row_of_another_width():
    nested = jagged(drawn([3, 0, 2], WIDTH))
    back = nested_like(torch.ones(1, 5, 7, 2), nested)
    assert [tuple(t.shape) for t in back.unbind()] == [(3, 7, 2), (0, 7, 2), (2, 7, 2)]


def test_nested_tensors_with_holes():
    """`torch.nested.narrow` keeps the whole buffer: what lies between the sequences is not theirs."""
    buffer = torch.randn(3, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    starts, lengths = [0, 2, 1], [2, 5, 0]
    nested = torch.nested.narrow(buffer, 1, torch.tensor(starts), torch.tensor(lengths), layout=torch.jagged)
    packed = packed_nested(nested)
    expected = [buffer[b, s : s + n] for b, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    assert packed.lengths == (2, 5, 0)
    assert torch.equal(packed.row[0], torch.cat(expected))
    back = nested_like(packed.row * 3, nested)
    assert back.shape == nested.shape
    for got, sequence in zip((back + nested).unbind(), expected, strict=True):
        assert torch.equal(got, 3 * sequence + sequence)
    packed_nested(back).row.sum().backward()
    assert buffer.grad[..., 0].tolist() == [[3, 3, 0, 0, 0, 0, 0], [0, 0, 3, 3, 3, 3, 3], [0] * 7]


def test_the_strided_layout_is_refused_with_its_conversion():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own on this layout, once in a process
        nested = torch.nested.nested_tensor([torch.ones(3, WIDTH), torch.ones(2, WIDTH)], layout=torch.strided)
    with pytest.raises(ValueError, match="nested: must have layout=torch.jagged, got torch.strided") as caught:
        packed_nested(nested)
    conversion = str(caught.value).rpartition(" with ")[2]
    converted = eval(conversion, {"torch": torch, "nested": nested})
    assert packed_nested(converted).lengths == (3, 2)


@pytest.mark.parametrize(
    ("nested", "error", "words"),
    [
        (torch.zeros(2, 3), TypeError, "nested: must be a nested tensor (B, j, ...), got a float32 tensor"),
        ([torch.zeros(2)], TypeError, "nested: must be a nested tensor (B, j, ...), got a list"),
        (
            torch.nested.nested_tensor([torch.zeros(3, 5), torch.zeros(2, 5)], layout=torch.jagged).transpose(1, 2),
            ValueError,
            "nested: the ragged axis must be the second, (B, j, ...), got shape (2, 5, j",
        ),
    ],
)
def test_what_is_not_a_jagged_batch_is_refused(nested, error, words):
    with pytest.raises(error, match=re.escape(words)):
        packed_nested(nested)
    with pytest.raises(error, match=re.escape(words)):
        nested_like(torch.zeros(1, 5, 5), nested)


def test_rows_of_other_tokens_are_refused():
    nested = jagged(drawn([3, 2], WIDTH))
    with pytest.raises(ValueError, match=re.escape("row: expected shape (1, 5, ...), 5 being the tokens of nested")):
        nested_like(torch.zeros(1, 6, WIDTH), nested)
