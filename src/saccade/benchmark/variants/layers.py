"""Compared layers of equal width: attention with projections, recurrent, convolutional and fully connected ones.

Shape legend: B batch, L tokens, E width, H heads, k kernel, d dilation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator._masks import Causal, Mask
from ...operator.nn import AttentionConfig, MultiHeadAttention
from ...operator.variants import MechanismConfig
from ...support._restored import seeded
from .contenders import ContenderRunner, DecodingRun, VariantContender, counted
from .data import ProblemSizes
from .readings import NO_STEP, described, refused
from .results import LAYER


class Stepping(nn.Module):
    """A layer (B, L, E) -> (B, L, E) with a decoding step."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    def decoding(self, x: Tensor) -> DecodingRun:
        """The decoding step of the last token."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerMaker(VariantContender):
    """A module as contender. `make` builds it, `refuse` returns why it cannot, `tell` returns its settings as text."""

    make: Callable[[ProblemSizes], Stepping] | None = None
    tell: Callable[[int], str] = lambda length: ""
    refuse: Callable[[ProblemSizes], str] = lambda sizes: ""
    form: Callable[[ProblemSizes], int] = lambda sizes: 0
    like: str = "other"
    first: bool = False
    kind = LAYER

    @property
    def computes(self) -> str:
        return self.like

    @property
    def whole(self) -> bool:
        return self.first

    def setting(self, length: int) -> str:
        return self.tell(length)

    def refusal(self, sizes: ProblemSizes) -> str:
        return self.refuse(sizes)

    def needs(self, sizes: ProblemSizes) -> int:
        return self.form(sizes)

    def module(self, sizes: ProblemSizes, seed: int) -> Stepping:
        """The module in evaluation mode, initialised from `seed`; the global generator is restored."""
        assert self.make is not None
        with seeded(seed):
            return self.make(sizes).eval()

    def build(self, sizes: ProblemSizes, tensors: tuple[Tensor, Tensor, Tensor], seed: int) -> ContenderRunner:
        """Tokens are the concatenated queries of all heads."""
        x = tensors[0].detach().transpose(1, 2).flatten(2).clone().requires_grad_()
        module = self.module(sizes, seed)

        def decoding() -> DecodingRun:
            with torch.no_grad():
                return module.decoding(x)

        parameters = tuple(module.parameters())
        return ContenderRunner(
            lambda: module(x),
            (x, *parameters),
            1,
            decoding if sizes.causal else NO_STEP,
            counted(module),
            lambda exact: exact,
        )


class AttentionLayer(Stepping):
    """`saccade.nn.MultiHeadAttention` as self-attention; its mask is causal or none by default."""

    def __init__(self, sizes: ProblemSizes, mechanism: MechanismConfig | None, mask: Mask | None = None):
        super().__init__()
        grouped = None if sizes.kv_heads == sizes.heads else sizes.kv_heads
        config: dict[str, Any] = dict(heads=sizes.heads, kv_heads=grouped, mechanism=mechanism)
        if mechanism is not None and mechanism.maps > 1:
            config["heads"] = sizes.heads // mechanism.maps
            config["kv_heads"] = None if grouped is None else grouped // mechanism.maps
        self.attention = MultiHeadAttention(AttentionConfig(sizes.width, **config))
        self.mask = Causal() if mask is None and sizes.causal else mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.mask)

    def decoding(self, x: Tensor) -> DecodingRun:
        cache = self.attention.cache()
        self.attention(x[:, :-1], Causal(), cache=cache)
        kept, last = cache.nbytes, x[:, -1:]

        def step() -> Tensor:
            out = self.attention(last, Causal(), cache=cache)
            cache.rollback(1)
            return out

        return DecodingRun(step, kept)


class RecurrentStack(Stepping):
    """`nn.LSTM` or `nn.GRU`; without causality a bidirectional one, with half the width each way."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], sizes: ProblemSizes):
        super().__init__()
        width = sizes.width if sizes.causal else sizes.width // 2
        self.recurrence = kind(sizes.width, width, batch_first=True, bidirectional=not sizes.causal)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrence(x)[0]

    def decoding(self, x: Tensor) -> DecodingRun:
        _, state = self.recurrence(x[:, :-1])
        last = x[:, -1:]
        parts = state if isinstance(state, tuple) else (state,)
        return DecodingRun(lambda: self.recurrence(last, state)[0], sum(part.nbytes for part in parts))


class Convolutions(Stepping):
    """A stack of `nn.Conv1d` with GELU between them; causal ones are padded on the left only."""

    def __init__(self, sizes: ProblemSizes, kernel: int, dilations: tuple[int, ...]):
        super().__init__()
        self.causal, self.kernel, self.dilations = sizes.causal, kernel, dilations
        self.convolutions = nn.ModuleList(
            nn.Conv1d(sizes.width, sizes.width, kernel, dilation=dilation) for dilation in dilations
        )

    def forward(self, x: Tensor) -> Tensor:
        features = x.transpose(1, 2)
        for layer, dilation in zip(self.convolutions, self.dilations, strict=True):
            reach = (self.kernel - 1) * dilation
            left = reach if self.causal else reach // 2
            features = layer(F.pad(self._between(layer, features), (left, reach - left)))
        return features.transpose(1, 2)

    def _between(self, layer: nn.Module, features: Tensor) -> Tensor:
        return features if layer is self.convolutions[0] else F.gelu(features)

    def decoding(self, x: Tensor) -> DecodingRun:
        """Each layer caches its last (k - 1) d inputs."""
        features, kept = x.transpose(1, 2), []
        for layer, dilation in zip(self.convolutions, self.dilations, strict=True):
            features = F.pad(self._between(layer, features), ((self.kernel - 1) * dilation, 0))
            kept.append(features[..., -(self.kernel - 1) * dilation - 1 : -1].contiguous())
            features = layer(features)
        last = x[:, -1:].transpose(1, 2)

        def step() -> Tensor:
            new = last
            for layer, past in zip(self.convolutions, kept, strict=True):
                new = layer(torch.cat([past, self._between(layer, new)], -1))
            return new.transpose(1, 2)

        return DecodingRun(step, sum(past.nbytes for past in kept))


class Connected(Stepping):
    """A fully connected layer over positions: y_i = sum_j W_ij x_j, with a weight for each pair (j <= i)."""

    def __init__(self, sizes: ProblemSizes):
        super().__init__()
        self.causal = sizes.causal
        self.weight = nn.Linear(sizes.length, sizes.length, bias=False).weight

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        weight = self.weight[:length, :length]
        return (weight.tril() if self.causal else weight) @ x

    def decoding(self, x: Tensor) -> DecodingRun:
        row = self.weight[-1:]
        return DecodingRun(lambda: row @ x, x.nbytes)


STACKED_KERNEL, STACKED = 7, 4
DILATED_KERNEL = 3


def dilations_for(length: int) -> tuple[int, ...]:
    """1, 3, 9, ... as many as reach the whole length: 1 + (k - 1) sum(d) >= L (k = 3)."""
    counts = [1]
    while 1 + (DILATED_KERNEL - 1) * sum(counts) < length:
        counts.append(counts[-1] * DILATED_KERNEL)
    return tuple(counts)


def attention_layer(name: str, usual: Callable[[int], MechanismConfig] | None = None) -> LayerMaker:
    """`MultiHeadAttention`, with a mechanism or with softmax attention."""
    if usual is None:
        return LayerMaker(name, lambda sizes: AttentionLayer(sizes, None), like="softmax", first=True)
    return LayerMaker(
        name,
        lambda sizes: AttentionLayer(sizes, usual(sizes.length)),
        lambda length: described(usual(length)),
        lambda sizes: refused(usual(max(sizes.length, 1)), sizes),
        like=usual(1024).traits.computes,
    )


def _halved(sizes: ProblemSizes) -> str:
    if sizes.causal or sizes.width % 2 == 0:
        return ""
    return f"one each way takes half of the width each, but the width is {sizes.width}"


OTHERS: tuple[LayerMaker, ...] = (
    LayerMaker("LSTM", lambda sizes: RecurrentStack(nn.LSTM, sizes), refuse=_halved),
    LayerMaker("GRU", lambda sizes: RecurrentStack(nn.GRU, sizes), refuse=_halved),
    LayerMaker(
        "convolutions",
        lambda sizes: Convolutions(sizes, STACKED_KERNEL, (1,) * STACKED),
        lambda length: f"layers={STACKED}, kernel={STACKED_KERNEL}",
    ),
    LayerMaker(
        "dilated-convolutions",
        lambda sizes: Convolutions(sizes, DILATED_KERNEL, dilations_for(sizes.length)),
        lambda length: f"layers={len(dilations_for(length))}, kernel={DILATED_KERNEL}",
    ),
    # Weights and their gradient and, if causal, masked copies of both.
    LayerMaker(
        "connected",
        Connected,
        lambda length: f"weights={length}x{length}",
        form=lambda sizes: 4 * sizes.length**2 * (4 if sizes.causal else 2),
    ),
)
