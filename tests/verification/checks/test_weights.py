"""Returned weights that are not those that were used are named, with what they are.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import textbook
import torch
from torch import Tensor, nn

from saccade.verification import Finding, Inapplicable, MaskReading, Reading
from saccade.verification.checks import _weights as weights
from saccade.verification.subject._subject import Subject

H, D, E = textbook.HEADS, 7, textbook.WIDTH
PAIRS = (MaskReading("mask", "B1QK", "attend"),)
RETURNED = "return self.out_proj(out), weights"


def found(target: object, reading: Reading) -> list[Finding]:
    torch.manual_seed(0)
    return list(weights.CHECK.run(Subject(target, reading)))


def of_text(folder: Path, returned: str = "", axes: str = "BHQK") -> list[Finding]:
    torch.manual_seed(0)
    new = f"return self.out_proj(out), {returned}" if returned else ""
    module = textbook.module(folder, RETURNED if new else "", new)
    return found(module, Reading("self", "BLD", E, out=0, weights=1, weights_axes=axes, masks=PAIRS))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("scores", "they are the scores that enter the softmax"),
        ("weights.transpose(-2, -1)", "queries and keys are exchanged"),
        ("weights.roll(1, 1)", "heads are in another order: head 0 has the weights of head 2"),
        ("weights.clamp(min=0.05)", "rows sum to 1"),
        ("weights + 1e-5", "is 1e-05, not 0, which is what was used"),
        ("weights * 2", "their rows sum to 2"),
        ("(q @ k.mT / math.sqrt(self.d_k)).softmax(-1)", "those without the mask, so that hidden keys have a weight"),
        ("dropped", "In training the weights that it returns have dropout in them"),
    ],
)
def test_each_is_named_on_the_line_that_returns_it(tmp_path: Path, returned: str, words: str):
    (finding,) = of_text(tmp_path, returned)
    assert (finding.family, finding.severity) == ("weights", "error")
    assert words in finding.message
    assert finding.location is not None
    assert finding.location.code == f"return self.out_proj(out), {returned}"


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("weights.sum(1)", "the sum over the 3 heads, and their rows sum to 3"),
        ("weights[:, 1]", "only those of head 1"),
        ("weights.mean(1).mT", "queries and keys are exchanged"),
    ],
)
def test_averages_over_heads_are_averages(tmp_path: Path, returned: str, words: str):
    (finding,) = of_text(tmp_path, returned, "BQK")
    assert words in finding.message


def test_the_weights_that_were_used_have_no_finding(tmp_path: Path):
    assert of_text(tmp_path) == []
    assert of_text(tmp_path, "weights.mean(dim=1)", "BQK") == []
    assert of_text(tmp_path, "weights.double()") == []


def of_function(target: Callable[..., tuple[Tensor, Tensor]]) -> list[Finding]:
    return found(target, Reading("attention", "BHLD", D, heads=H, out=0, weights=1, masks=PAIRS))


def test_functions_are_compared_with_what_their_outputs_show():
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, wrong: bool = False):
        scores = q @ k.mT / math.sqrt(D)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        own = scores.softmax(-1)
        return own @ v, (scores * 2).softmax(-1) if wrong else own

    assert of_function(attention) == []
    (finding,) = of_function(lambda q, k, v, mask=None: attention(q, k, v, mask, True))
    assert "was used" in finding.message


def test_faults_of_other_families_are_not_told_again():
    def over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None):
        own = (q @ k.mT / math.sqrt(D)).softmax(-2)
        return own @ v, own

    def noisy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None):
        own = (q @ k.mT / math.sqrt(D)).softmax(-1)
        return torch.dropout(own, 0.5, True) @ v, own

    def writing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None):
        own = (q.div_(math.sqrt(D)) @ k.mT).softmax(-1)
        return own @ v, own

    for function in (over_queries, noisy):
        with pytest.raises(Inapplicable, match="could not be followed, or differ from call to call"):
            of_function(function)
    assert of_function(writing) == []


def test_without_weights_there_is_nothing_to_compare(tmp_path: Path):
    with pytest.raises(Inapplicable, match="returns no weights"):
        found(textbook.module(tmp_path), Reading("self", "BLD", E, out=0))


def test_pytorchs_own_returns_dropout_by_convention():
    reading = Reading("qkv", "BLD", E, out=0, weights=1, weights_axes="BQK")
    (finding,) = found(nn.MultiheadAttention(E, H, 0.25, batch_first=True).eval(), reading)
    assert finding.severity == "warning"
    assert "nn.MultiheadAttention returns them so" in finding.message
