"""Mechanisms small enough to be right at sight, for the tests of what holds one.

Shape legend: B batch, Hq / Hkv query and key-value heads, L length, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import saccade
from saccade.variants import HeadSizes, Mechanism, MechanismConfig, Recurrent, Traits, causal_padding_of

TOY = dict(paper="none", computes="other", time="L", memory="L", choose="Never.", avoid="Always.")


class Exact(Mechanism):
    """Softmax attention."""

    def forward(self, query, key, value, mask=None, **options):
        return saccade.attention(query, key, value, mask, **options)


@dataclass(frozen=True)
class ExactConfig(MechanismConfig):
    name = "exact"
    traits = Traits(**TOY, masks=True, takes=("bias", "scale", "softcap", "sink", "dropout"))

    @classmethod
    def usual(cls, length):
        return cls()

    def build(self, heads):
        return Exact()


class NoPairs(Mechanism):
    """Softmax attention that honours `Causal()` and `Padding` alone."""

    def forward(self, query, key, value, mask=None):
        causal_padding_of(
            mask, query.shape[0], query.shape[2], key.shape[2], query.device, "no-pairs", "this is a test"
        )
        return saccade.attention(query, key, value, mask)


@dataclass(frozen=True)
class NoPairsConfig(ExactConfig):
    name = "no-pairs"
    traits = Traits(**TOY, masks="it forms no pairs")

    def build(self, heads):
        return NoPairs()


class MeanState(NamedTuple):
    total: Tensor  # (B, Hkv, Dv)
    count: Tensor  # (B,)


class Mean(Recurrent):
    """out_i = the mean of the values seen, weighted by nothing; times sigmoid(query . key_i) where both stand at i."""

    def __init__(self, heads: HeadSizes):
        super().__init__()
        self.heads = heads
        self.fails = False

    def forward(self, query, key, value, mask=None):
        batch, _, rows, _ = query.shape
        says = causal_padding_of(mask, batch, rows, key.shape[2], query.device, "mean", "a mean has no pairs")
        i, j = torch.arange(rows)[:, None], torch.arange(key.shape[2])
        sees = torch.ones(batch, rows, key.shape[2], dtype=torch.bool)
        if says.causal:
            sees = sees & (j <= i + key.shape[2] - rows)
        if says.keys is not None:
            sees = sees & says.keys[:, None]
            value = value.masked_fill(~says.keys[:, None, :, None], 0.0)
        if says.rows is not None:
            sees = sees & says.rows[:, :, None]
        weights = sees.to(value.dtype) / sees.sum(-1, keepdim=True).clamp(min=1)
        return (weights[:, None] @ value).repeat_interleave(query.shape[1] // value.shape[1], 1)

    def step(self, query, key, value, state=None, mask=None):
        if self.fails:
            raise RuntimeError("told to fail")
        batch, heads, rows, width = value.shape
        if state is None:
            state = MeanState(value.new_zeros(batch, heads, width), value.new_zeros(batch))
        if state.total.shape != (batch, heads, width):
            raise ValueError(f"state: has total {tuple(state.total.shape)}, expected {(batch, heads, width)}")
        says = causal_padding_of(mask, batch, rows, rows, query.device, "mean", "a mean has no pairs")
        real = torch.ones(batch, rows, dtype=torch.bool) if says.keys is None else says.keys
        value = value.masked_fill(~real[:, None, :, None], 0.0)
        totals = state.total[:, :, None] + value.cumsum(2)
        counts = state.count[:, None] + real.cumsum(1)
        out = (totals / counts.clamp(min=1)[:, None, :, None]).masked_fill(~real[:, None, :, None], 0.0)
        after = MeanState(totals[:, :, -1], counts[:, -1].to(value.dtype)) if rows else state
        return out.repeat_interleave(query.shape[1] // heads, 1), after


@dataclass(frozen=True)
class MeanConfig(ExactConfig):
    name = "mean"
    traits = Traits(**TOY, masks="a mean has no pairs", recurrent=True)

    def build(self, heads):
        return Mean(heads)


class Twice(Mechanism):
    """Two maps of each head, which lie side by side: the first minus half the second, of the same values."""

    def forward(self, query, key, value, mask=None):
        return saccade.attention(query[:, ::2], key[:, ::2], value, mask) - 0.5 * saccade.attention(
            query[:, 1::2], key[:, 1::2], value, mask
        )


@dataclass(frozen=True)
class TwiceConfig(ExactConfig):
    name = "twice"
    traits = Traits(**TOY, masks=True)
    maps = 2

    def build(self, heads):
        return Twice()


@dataclass(frozen=True)
class SharedConfig(ExactConfig):
    """Softmax attention whose keys are its queries."""

    name = "shared"
    traits = Traits(**TOY, masks=True)
    shares_key = True


class Weighed(Mechanism):
    """Softmax attention, each row times a number read from its token; and a parameter."""

    def __init__(self, heads: HeadSizes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads.width))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)

    def forward(self, query, key, value, mask=None, *, tokens):
        return saccade.attention(query, key, value, mask) * (tokens @ self.weight)[:, None, :, None]


@dataclass(frozen=True)
class WeighedConfig(ExactConfig):
    name = "weighed"
    traits = Traits(**TOY, masks="this is a test")
    reads_tokens = True
    layer: int = 0

    def build(self, heads):
        return Weighed(heads)

    def at_depth(self, layer):
        return type(self)(layer)


@dataclass(frozen=True)
class NothingConfig(ExactConfig):
    """Can do nothing it is asked for."""

    name = "nothing"
    traits = Traits(
        **TOY,
        causal="all tokens are mixed",
        cross="it is made of one sequence",
        masks="no pairs are formed",
        cached="keys are mixed",
        grouped="heads are alone",
    )
