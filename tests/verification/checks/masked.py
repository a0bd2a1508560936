"""Attention with a hole for its mask: what the tests of the masks' checks break in one place.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.verification import Check, Finding, MaskReading, Promise, Reading
from saccade.verification.subject._subject import Subject

D, E, H = 11, 24, 3
INF = float("-inf")
ATTENTION = Reading("attention", "BHLD", D, heads=H)
MODULE = Reading("self", "BLD", E, heads=H)


def triangle(length: int, offset: int = 0) -> Tensor:
    """(L, L) True on and below a diagonal."""
    return torch.ones(length, length, dtype=torch.bool).tril(offset)


def hiding(mask_of: Callable[[int], Tensor], fill: float = INF) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention proper whose hidden scores, by a mask of the length, are set to `fill`."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        return scores.masked_fill(~mask_of(scores.shape[-1]), fill).softmax(-1) @ value

    return attention


Weigh = Callable[[Tensor, "Tensor | None"], Tensor]


def weighing(weigh: Weigh) -> Callable[..., Tensor]:
    """Attention proper that makes weights of scores (B, H, Lq, Lk) and the mask that it is given."""

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return weigh(query @ key.mT * query.shape[-1] ** -0.5, mask) @ value

    return attention


def softmax_where(scores: Tensor, mask: Tensor | None) -> Tensor:
    """As it should be."""
    return (scores if mask is None else scores.masked_fill(~mask, INF)).softmax(-1)


class Layer(nn.Module):
    """Multi-head self-attention; `weigh` makes weights of scores and mask, `around` is done to what comes out."""

    def __init__(self, weigh: Weigh, around: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.weigh, self.around = weigh, around
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = self.weigh(query @ key.mT * query.shape[-1] ** -0.5, mask)
        return self.around(self.out((weights @ value).transpose(1, 2).flatten(2)))


def causal(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Weights of causal attention."""
    return softmax_where(scores, triangle(scores.shape[-1]))


def run(check: Check, target: Any, reading: Reading = ATTENTION, **promise: Any) -> list[Finding]:
    return list(check.run(Subject(target, reading, Promise(**promise))))


def only_error(findings: list[Finding]) -> Finding:
    """The one error there is."""
    (error,) = [finding for finding in findings if finding.severity == "error"]
    assert error.effect and error.fix
    return error


def with_mask(axes: str, meaning: str = "attend", **fields: Any) -> MaskReading:
    return MaskReading("mask", axes, meaning, **fields)  # type: ignore[arg-type]
