"""The trained models: a mechanism in every layer of a decoder, or a recurrent network of the same width.

Shape legend: B batch, L length, E width, D key width, Dv value width of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...operator._masks import Window
from ...operator.nn import AttentionConfig, BlockConfig, Decoder
from ...operator.nn.norm import make_norm
from ...operator.variants import MechanismConfig, Recurrent


@dataclass(frozen=True)
class TaskContender(ABC):
    """A causal model body.

    Args:
        name: shown in tables.
    """

    name: str

    @abstractmethod
    def body(self, width: int, layers: int, length: int) -> nn.Module:
        """A causal module (B, L, E) -> (B, L, E) with normalised output, initialised by the global generator."""

    @abstractmethod
    def remembers(self, width: int, layers: int, length: int) -> int:
        """Number of stored values after `length` tokens, in all layers (state, or keys and values)."""


@dataclass(frozen=True)
class AttentionBlocks(TaskContender):
    """Pre-norm blocks with attention only, without feed-forward layers.

    Args:
        mechanism: replaces softmax attention; None is softmax attention.
        heads: number of heads.
        head: D; None is E / heads. The width of values is always E / heads.
        window: number of visible tokens, including the token itself; None is all.

    Raises:
        ValueError: a mechanism that cannot be causal.
    """

    mechanism: MechanismConfig | None = None
    heads: int = 1
    head: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        causal = True if self.mechanism is None else self.mechanism.traits.causal
        if isinstance(causal, str):
            raise ValueError(f"mechanism: {self.name} cannot read in order, since {causal}")

    def config(self, width: int) -> AttentionConfig:
        return AttentionConfig(
            width,
            self.heads,
            head_width=self.head,
            value_head_width=None if self.head is None else width // self.heads,
            window=None if self.window is None else Window(self.window - 1, 0),
            mechanism=self.mechanism,
        )

    def body(self, width: int, layers: int, length: int) -> nn.Module:
        return Decoder(BlockConfig(self.config(width), hidden=0), layers)

    def remembers(self, width: int, layers: int, length: int) -> int:
        config = self.config(width)
        built = None if self.mechanism is None else self.mechanism.build(config.heads_for_mechanism())
        if isinstance(built, Recurrent):
            return layers * _state_size(built, config)
        shape = config.shape
        visible = length if self.window is None else min(length, self.window)
        return layers * visible * (shape.key_heads * shape.head + shape.kv_heads * shape.value_head)


@dataclass(frozen=True)
class RecurrentNetwork(TaskContender):
    """`nn.LSTM` or `nn.GRU` of width E, and a norm."""

    kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM

    def body(self, width: int, layers: int, length: int) -> nn.Module:
        return _RecurrentLayers(self.kind(width, width, layers, batch_first=True), width)

    def remembers(self, width: int, layers: int, length: int) -> int:
        return layers * width * (2 if self.kind is nn.LSTM else 1)


class _RecurrentLayers(nn.Module):
    def __init__(self, network: nn.Module, width: int):
        super().__init__()
        self.network, self.norm = network, make_norm("rms", width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.network(x)[0])


@torch.no_grad()
def _state_size(mechanism: Recurrent, config: AttentionConfig) -> int:
    """Number of values in the state, whose size is constant."""
    shape = config.shape
    query = torch.zeros(1, shape.query_heads, 1, shape.head)
    key = torch.zeros(1, shape.key_heads, 1, shape.head)
    value = torch.zeros(1, shape.kv_heads, 1, shape.value_head)
    reads_tokens = config.mechanism is not None and config.mechanism.reads_tokens
    options: dict[str, Any] = {"tokens": torch.zeros(1, 1, config.width)} if reads_tokens else {}
    _, state = mechanism.step(query, key, value, **options)
    return sum(part.numel() for part in state)
