"""Masks of the queries' own sequence beside a context are found, and what is wrong with them is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import saccade
from saccade.verification.subject.discovery._discover import discover


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, other, mask=None, real=None):
        split = [
            one.unflatten(-1, (3, -1)).transpose(1, 2) for one in (self.query(x), self.key(other), self.value(other))
        ]
        scores = split[0] @ split[1].mT / math.sqrt(split[0].shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None, :], -math.inf)
        return (scores.softmax(-1) @ split[2]).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.cross = Attention(15), Attention(15)

    def forward(self, x, memory, tgt_mask=None, tgt_padding_mask=None, memory_mask=None):
        """tgt_mask: (n, n), True = attend; tgt_padding_mask: (b, n), True = real; memory_mask: (b, m), True = real"""
        x = x + self.attend(x, tgt_mask, tgt_padding_mask)
        return x + self.cross(x, memory, None, memory_mask)

    def attend(self, x, mask, padding):
        return self.own(x, x, mask, padding)


class Inverted(Decoder):
    def attend(self, x, mask, padding):
        return self.own(x, x, None if mask is None else ~mask, padding)


class Unpadded(Decoder):
    def attend(self, x, mask, padding):
        return self.own(x, x, mask)


def shapes(masks):
    return {(mask.argument, mask.axes, mask.meaning) for mask in masks}


def test_each_sequence_has_masks_of_its_own():
    reading = discover(Decoder()).reading
    assert (reading.form, reading.width) == ("cross", 15)
    assert shapes(reading.masks) == {("memory_mask", "BK", "attend")}
    assert shapes(reading.own_masks) >= {("tgt_mask", "QK", "attend"), ("tgt_padding_mask", "BK", "attend")}
    assert {mask.argument for mask in reading.own_masks} == {"tgt_mask", "tgt_padding_mask"}


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_pytorchs_decoder_layer(batch_first):
    layer = nn.TransformerDecoderLayer(20, 4, 32, batch_first=batch_first)
    subject = discover(layer)
    assert shapes(subject.reading.own_masks) == {
        ("tgt_mask", "QK", "ignore"),
        ("tgt_mask", "BHQK", "ignore"),
        ("tgt_key_padding_mask", "BK", "ignore"),
    }
    part = subject.own_part
    inputs = part.inputs(2, 7)
    triangle = torch.ones(7, 7, dtype=torch.bool).tril()
    out = part(inputs, pairs=triangle).out
    changed = part(inputs.changed([6]), pairs=triangle).out
    torch.testing.assert_close(changed[:, :6], out[:, :6])
    assert not torch.allclose(part(inputs.changed([6])).out[:, :6], part(inputs).out[:, :6])


def test_a_module_without_such_masks_has_no_own_part():
    assert discover(Attention(15)).own_part is None


@pytest.mark.slow
@pytest.mark.parametrize("target", [Decoder(), nn.TransformerDecoderLayer(20, 4, 32, batch_first=True)])
def test_right_ones_are_clean(target):
    report = saccade.verify(target, isolated=False, checks=["mask-meaning", "padding"])
    assert report.errors == ()
    assert {outcome.status for outcome in report.outcomes} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "family", "words"),
    [(Inverted(), "mask-meaning", "The polarity is inverted"), (Unpadded(), "mask-meaning", "tgt_padding_mask")],
)
def test_wrong_ones_are_named(target, family, words):
    report = saccade.verify(target, isolated=False, checks=["mask-meaning", "padding"])
    named = [finding for finding in report.errors if finding.family == family]
    assert [words in finding.message or words == finding.evidence.get("argument") for finding in named] == [True]
    assert len(report.errors) <= 2
    assert "memory" not in str(report.errors)
