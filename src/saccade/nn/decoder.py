"""Decoder blocks and a stack of them.

Shapes: B batch, L length, E model width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .._masks import Causal
from ..positions import Rotary
from .attention import MultiHeadAttention, Observer
from .cache import KVCache, LayerCache
from .feed_forward import SwiGLU

if TYPE_CHECKING:
    from .._masks import Mask

LayerObserver = Callable[[int, Tensor, Tensor, Tensor, "Mask | Tensor | None"], None]


class DecoderBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`: (B, L, E) -> (B, L, E).

    Pre-norm (Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020) with RMSNorm (Zhang and
    Sennrich, 2019) and SwiGLU. `dropout` acts on what is added to the residual stream.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
    ):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = MultiHeadAttention(width, heads, kv_heads=kv_heads, rotary=rotary)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = SwiGLU(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        cache: LayerCache | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """x (B, L, E) to (B, L, E). `mask`, `cache` and `observe` are those of `MultiHeadAttention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, cache=cache, observe=observe))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Decoder(nn.Module):
    """A stack of causal `DecoderBlock`s with rotary positions and a last norm: (B, L, E) -> (B, L, E).

    Args:
        width, heads, kv_heads, hidden, dropout: as in `DecoderBlock`.
        layers: how many blocks.
        rotary_base: as in `saccade.positions.Rotary`.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        rotary_base: float = 10000.0,
    ):
        super().__init__()
        if layers < 1:
            raise ValueError(f"layers: must be at least 1, got {layers}")
        if heads < 1 or width % heads:
            raise ValueError(f"heads: must divide the width, got heads={heads} and width={width}")
        rotary = Rotary(width // heads, rotary_base)
        block = functools.partial(
            DecoderBlock, width, heads, kv_heads=kv_heads, hidden=hidden, dropout=dropout, rotary=rotary
        )
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        cache: KVCache | None = None,
        observe: LayerObserver | None = None,
    ) -> Tensor:
        """`mask=None` is `Causal()`. With a cache, `x` continues the tokens in it.

        `observe(layer, query, key, value, mask)` is called in each layer with what goes into `saccade.attention`.
        """
        if cache is not None and len(cache) != len(self.blocks):
            raise ValueError(f"cache: made for {len(cache)} layers, but the decoder has {len(self.blocks)}")
        mask = Causal() if mask is None else mask
        for layer, block in enumerate(self.blocks):
            x = block(
                x,
                mask,
                cache=None if cache is None else cache[layer],
                observe=None if observe is None else functools.partial(observe, layer),
            )
        return self.norm(x)
