"""Weights that queries or keys do not make are named as that, and may be promised.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import saccade
from saccade.verification import Finding, Inapplicable, Promise, Reading
from saccade.verification.checks import _scale as scale
from saccade.verification.subject._subject import Subject

H, D, E = 3, 7, 21
ATTENTION = Reading("attention", "BHLD", D, H)


def found(target: object, reading: Reading = ATTENTION, promise: Promise | None = None) -> list[Finding]:
    torch.manual_seed(0)
    return list(scale.CHECK.run(Subject(target, reading, promise or Promise())))


def rows_times_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.zeros(q.shape[-2], dtype=torch.bool)
    scores = scores * mask.unsqueeze(-1)
    return scores.softmax(-1) @ v


def some_rows_times_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.arange(q.shape[-2]) < 4
    return (scores * mask.unsqueeze(-1)).softmax(-1) @ v


def columns_times_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.arange(k.shape[-2]) < 4
    return (scores * mask).softmax(-1) @ v


def keys_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = k @ k.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def queries_of_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ q.mT * q.shape[-1] ** -0.5
    return scores.softmax(-1) @ v


def same_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.mean(-2, keepdim=True).expand_as(k)
    return F.scaled_dot_product_attention(q, k, v)


def average(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)


IGNORING = [
    (rows_times_mask, "both", "multiplied by 0, a mask that is False", "scores = scores * mask.unsqueeze(-1)"),
    (some_rows_times_mask, "both", "of queries 4 to 6 (of 7)", "return (scores * mask.unsqueeze(-1)).softmax(-1) @ v"),
    (columns_times_mask, "both", "multiplied by 0 and not hidden", "return (scores * mask).softmax(-1) @ v"),
    (keys_of_keys, "query", "do not depend on the queries", "scores = k @ k.mT * q.shape[-1] ** -0.5"),
    (queries_of_queries, "key", "do not depend on the keys", "scores = q @ q.mT * q.shape[-1] ** -0.5"),
    (same_keys, "both", "neither queries nor keys", "return F.scaled_dot_product_attention(q, k, v)"),
    (average, "both", "neither queries nor keys", "return v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)"),
]


@pytest.mark.parametrize(("attend", "side", "words", "line"), IGNORING)
def test_weights_that_ignore_queries_or_keys_are_named_on_their_line(
    attend: Callable[..., Tensor], side: str, words: str, line: str
):
    (finding,) = found(attend)
    assert finding.severity == "error" and words in finding.message
    assert finding.evidence["depends_not_on"] == side
    assert finding.location is not None and finding.location.code == line


class Mixing(nn.Module):
    """Attention of one head whose weights `mix` makes of scores."""

    def __init__(self, mix: Callable[[Tensor], Tensor]):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        self.mix = mix

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.q(x) @ self.k(x).mT * E**-0.5
        if mask is not None:
            scores = scores * mask.unsqueeze(-1)
        return self.out(self.mix(scores) @ self.v(x))


AVERAGES = [lambda scores: scores.mul(0).softmax(-1), lambda scores: torch.full(scores.shape, 1 / scores.shape[-1])]


@pytest.mark.parametrize("mix", AVERAGES)
def test_averages_in_a_module_are_named_and_may_be_promised(mix: Callable[[Tensor], Tensor]):
    module, reading = Mixing(mix), Reading("self", "BLD", E)
    (finding,) = found(module, reading)
    assert finding.severity == "error" and "neither queries nor keys" in finding.message
    assert "Promise(scale=0)" in finding.fix
    assert finding.location is not None
    assert found(module, reading, Promise(scale=0.0)) == []


def keys_for_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ k.mT * k.shape[-1] ** -0.5).softmax(-1) @ v


def test_a_promise_of_averages_is_of_queries_and_keys():
    (finding,) = found(keys_for_both, promise=Promise(scale=0.0))
    assert "do not depend on the queries" in finding.message and "Promise(scale=0)" not in finding.fix


def test_a_promise_of_averages_is_held_against_attention():
    (finding,) = found(F.scaled_dot_product_attention, promise=Promise(scale=0.0))
    assert finding.severity == "error" and "where 0 is expected (the declared scale)" in finding.message
    assert found(some_rows_times_mask, promise=Promise(scale=0.0))


def test_a_context_that_gives_values_alone_is_named():
    class Crossed(Mixing):
        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).mT * E**-0.5
            return self.out(scores.softmax(-1) @ self.v(context))

    (finding,) = found(Crossed(torch.relu), Reading("cross", "BLD", E))
    assert finding.evidence["depends_not_on"] == "key"
    assert finding.location is not None and finding.location.code == "scores = self.q(x) @ self.k(x).mT * E**-0.5"


def test_a_padding_mask_that_multiplies_queries_is_told_both():
    report = saccade.verify(Mixing(lambda scores: scores.softmax(-1)), isolated=False, checks=["mask-meaning"])
    (finding,) = report.errors
    assert "it hides queries where it should hide keys" in finding.message
    assert "it is multiplied into the scores" in finding.message
    assert 'scores.masked_fill(~mask[:, None, :], float("-inf"))' in finding.fix  # (batch, queries, keys) as scores are


class Inverted(nn.Module):
    """mask: (batch, length), True = padding."""

    def __init__(self, width=24, fill=-1e4):
        super().__init__()
        self.qkv, self.out, self.fill = nn.Linear(width, 3 * width), nn.Linear(width, width), fill

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask[:, None, None, :], self.fill)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("fill", "follow"), [(-1e4, {"mixing"}), (-math.inf, {"precision", "causal-blindness"})])
def test_what_an_inverted_mask_hides_in_every_call_is_one_error(fill, follow):
    """Uniform weights use no queries and keys, and NaN is nothing: both come of a mask that hides all."""
    names = ["mask-meaning", "mixing", "precision", "causal-blindness"]
    report = saccade.verify(Inverted(fill=fill).eval(), isolated=False, checks=names)
    (error,) = report.errors
    assert "The polarity is inverted" in error.message and "masked_fill(~mask[" in error.location.code
    followed = [
        finding for finding in report.findings if finding.message.endswith("Probably follows from mask-meaning.")
    ]
    assert {one.check for one in followed} == follow and len(report.findings) == 1 + len(follow)


def test_unused_projections_follow_from_weights_that_ignore_them():
    class Fused(Mixing):
        def __init__(self) -> None:
            super().__init__(AVERAGES[0])
            self.qkv = nn.Linear(E, 3 * E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out(self.mix(q @ k.mT) @ v)

    report = saccade.verify(Fused(), isolated=False, checks=["scale", "mixing", "gradients"])
    assert [finding.family for finding in report.errors] == ["scale"], str(report)


def test_queries_that_begin_at_zero_and_a_key_of_zeros_ignore_nothing():
    zero = nn.MultiheadAttention(E, H, batch_first=True, add_zero_attn=True)
    assert found(zero, Reading("qkv", "BLD", E, H, out=0)) == []
    begins = Mixing(lambda scores: scores.softmax(-1))
    nn.init.zeros_(begins.q.weight)
    nn.init.zeros_(begins.q.bias)
    with pytest.raises(Inapplicable, match="logits are not proportional to q.k"):
        found(begins, Reading("self", "BLD", E))
