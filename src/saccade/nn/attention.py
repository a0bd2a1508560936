"""Multi-head attention as a module.

Shapes: B batch, Hq/Hkv query/kv heads, L length, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .._attention import attention
from ..positions import Rotary
from .cache import LayerCache

if TYPE_CHECKING:
    from .._masks import Mask

Observer = Callable[[Tensor, Tensor, Tensor, "Mask | Tensor | None"], None]


class MultiHeadAttention(nn.Module):
    """Self-attention with several heads: project to q, k, v; attend; project back. (B, L, E) -> (B, L, E).

    `out = concat_h(attention(x Wq_h, x Wk_h', x Wv_h')) Wo` with `h' = h // (heads // kv_heads)`: Vaswani et al.,
    "Attention Is All You Need" (2017); fewer key/value heads: Ainslie et al., "GQA" (2023).

    Args:
        width: E.
        heads: query heads Hq; must divide the width into heads of D = E / Hq.
        kv_heads: key/value heads Hkv; must divide `heads`; None is one for each query head.
        rotary: turns queries and keys by their positions; None leaves attention without positions.
        dropout: probability of dropping an attention weight in training.
        bias: whether the projections have one.

    `projection` holds Wq, Wk, Wv one below the other: rows [0, E), [E, E + Hkv D), [E + Hkv D, E + 2 Hkv D).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        rotary: Rotary | None = None,
        dropout: float = 0.0,
        bias: bool = False,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_heads(width, heads, kv_heads)
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        if rotary is not None and rotary.width != self.head_width:
            raise ValueError(f"rotary: heads are {self.head_width} wide, but it turns {rotary.width} features")
        self.rotary = rotary
        self.dropout = dropout
        self.projection = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        cache: LayerCache | None = None,
        observe: Observer | None = None,
    ) -> Tensor:
        """Attend within `x (B, L, E)` and, with a cache, to all tokens in it (which `x` then joins).

        `observe(query, key, value, mask)` is called with what goes into `saccade.attention`.
        """
        if x.ndim != 3 or x.shape[-1] != self.output.in_features:
            raise ValueError(f"x: expected shape (batch, length, {self.output.in_features}), got {tuple(x.shape)}")
        query, key, value = self._project(x)
        if self.rotary is not None:
            offset = 0 if cache is None else cache.length
            query, key = self.rotary(query, offset), self.rotary(key, offset)
        if cache is not None:
            key, value = cache.append(key, value)
        if observe is not None:
            observe(query, key, value, mask)
        out = attention(query, key, value, mask, dropout=self.dropout if self.training else 0.0)
        return self.output(out.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, L, D) and keys and values (B, Hkv, L, D)."""
        heads = self.projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return query, key, value


def check_heads(width: int, heads: int, kv_heads: int) -> None:
    """ValueError unless the heads divide the width and the key/value heads divide the heads."""
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(f"heads: must divide the width, got heads={heads} and width={width}")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads: must divide the heads, got kv_heads={kv_heads} and heads={heads}")
