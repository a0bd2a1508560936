"""Queries, keys and values in one tensor: packed as the target unpacks them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import saccade
from saccade.verification import Undecided
from saccade.verification.subject.discovery._discover import discover
from saccade.verification.subject.discovery._forms import HEADS, WIDTH


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1) @ v


def flash(qkv):
    return attention(*qkv.transpose(1, 3).unbind(2)).transpose(1, 2)


def stacked_first(qkv, mask=None):
    q, k, v = qkv
    return attention(q, k, v, mask)


def by_index(qkv):
    return attention(qkv[:, 0], qkv[:, 1], qkv[:, 2])


def any_heads(qkv):
    return attention(*qkv.unbind(2))


def side_by_side(qkv):
    return attention(*qkv.chunk(3, -1))


def side_by_side_of_heads(qkv, num_heads):
    q, k, v = (one.unflatten(-1, (num_heads, -1)).transpose(1, 2) for one in qkv.chunk(3, -1))
    return attention(q, k, v).transpose(1, 2).flatten(2)


def keys_and_values(q, kv):
    k, v = kv.unbind(2)
    return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


class Inner(nn.Module):
    def forward(self, qkv):
        return flash(qkv)


def without_scale(qkv):
    q, k, v = qkv.unbind(2)
    return (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1).matmul(v.transpose(1, 2)).transpose(1, 2)


def of_no_usual_way(qkv):
    q, k, v = qkv.reshape(5, 5, 5, 3).unbind(-1)
    return attention(q, k, v)


@pytest.mark.parametrize(
    ("target", "layout", "axis"),
    [
        (flash, "BLHD", 2),
        (stacked_first, "BHLD", 0),
        (by_index, "BHLD", 1),
        (any_heads, "BHLD", 2),
        (side_by_side, "BLD", 2),
        (side_by_side_of_heads, "BLD", 2),
        (keys_and_values, "BLHD", 2),
        (Inner(), "BLHD", 2),
    ],
)
def test_a_packing_is_found_by_what_it_computes(target, layout, axis):
    subject = discover(target)
    assert (subject.reading.layout, subject.reading.call.axis) == (layout, axis)
    inputs = subject.inputs(2, 6)
    tensors = list(inputs.tensors.values())
    if subject.form == "qkv":
        heads = subject.reading.heads
        tensors = [tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in tensors]
        expected = attention(*tensors).transpose(1, 2).flatten(2)
    else:
        expected = attention(*tensors)
    torch.testing.assert_close(subject(inputs).out, expected)
    assert any("in one tensor" in words for words in subject.reading.assumed)


def test_masks_come_beside_it():
    assert {mask.meaning for mask in discover(stacked_first).reading.masks} == {"attend"}


def test_a_fault_in_it_is_named():
    report = saccade.verify(without_scale, isolated=False, checks=["scale"])
    assert [finding.family for finding in report.errors] == ["scale"]
    assert saccade.verify(flash, isolated=False, checks=["scale"]).ok


def test_another_packing_asks_for_an_adapter_and_gives_it():
    with pytest.raises(Undecided, match="def call\\(target, query, key, value\\)") as raised:
        discover(of_no_usual_way)
    assert raised.value.candidates == (("the adapter", "--adapter FILE.py:call"),)


def _stacking(target, query, key, value):
    return target(torch.stack([query, key, value], dim=2).permute(1, 3, 4, 0, 2).reshape(-1, 3))


def of_an_odd_shape(qkv):
    """One row of three for each number of the heads, in an order of its own."""
    shape = (HEADS, -1, WIDTH, 2, 3)
    q, k, v = qkv.reshape(shape).permute(3, 0, 1, 2, 4).unbind(-1)
    return attention(q, k, v)


def test_the_adapter_decides():
    with pytest.raises(Undecided):
        discover(of_an_odd_shape)
    subject = discover(of_an_odd_shape, how=_stacking)
    inputs = subject.inputs(2, 6)
    torch.testing.assert_close(subject(inputs).out, attention(*inputs.tensors.values()))
