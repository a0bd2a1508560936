"""Blocks: attention and, unless it is left out, a feed-forward layer around a residual stream.

Shape legend: B batch, L length, Lc length of a context, E model width, C context width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from .._biases import Bias
from .._int8 import RowNorm
from .._masks import Mask, Padding
from .._products import layer_norm
from .._unknown_arguments import advised
from ..batching import fill_padding
from ..positions import Offset
from ._initial import begin_anew
from ._ragged import refuse_with_nested, through_nested
from .attention import MultiHeadAttention, Observation, Observer, check_tokens, check_weights, weights_of
from .cache import ContextLayer, LayerCache
from .config import BlockConfig
from .feed_forward import FeedForward, dropped, unread
from .norm import make_norm


class Context(NamedTuple):
    """The input of cross-attention: another sequence, its mask, and the cache of its keys and values.

    Attributes:
        tokens: (B, Lc, C), or (B / n, Lc, C) where n items of x, one after another, read the same.
        mask: who sees what of it, True = attend; None shows everything.
        cache: keeps keys and values between calls; None projects them in each call.

    Example:
        >>> import torch, saccade
        >>> attention = saccade.nn.AttentionConfig(16, heads=4)
        >>> block = saccade.nn.DecoderBlock(saccade.nn.BlockConfig(attention, cross=attention))
        >>> context = saccade.nn.Context(torch.randn(2, 7, 16), mask=saccade.Padding([7, 4]))
        >>> block(torch.randn(2, 5, 16), saccade.Causal(), context=context).shape
        torch.Size([2, 5, 16])
    """

    tokens: Tensor  # (B, Lc, C), or (B / n, Lc, C) where n items of x, one after another, read the same
    mask: Mask | Tensor | None = None
    cache: ContextLayer | None = None


class EncoderBlock(nn.Module):
    """One layer of an encoder: (B, L, E) -> (B, L, E).

        pre       y = x + attention(norm(x));    out = y + feed_forward(norm(y))
        post      y = norm(x + attention(x));    out = norm(y + feed_forward(y))
        parallel  out = x + attention(n) + feed_forward(n),    n = norm(x)

    With `hidden=0` there is no feed-forward layer, and out is y (parallel: x + attention(n)).

    Post: Vaswani et al., "Attention Is All You Need" (2017), section 3.1. Pre: Xiong et al., "On Layer Normalization
    in the Transformer Architecture" (2020). Parallel: Wang and Komatsuzaki, GPT-J (2021).

    Args:
        config: what it is made of.

    Example:
        >>> import torch, saccade
        >>> block = saccade.nn.EncoderBlock(saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4)))
        >>> block(torch.randn(2, 5, 16), padding=saccade.Padding([5, 3])).shape
        torch.Size([2, 5, 16])
    """

    shared_positions: int | None = 0  # which of the positions that its stack holds; None: none

    def __init__(self, config: BlockConfig):
        super().__init__()
        if not isinstance(config, BlockConfig):
            raise TypeError(f"config: expected BlockConfig, got {type(config).__name__}")
        if config.cross is not None and not isinstance(self, DecoderBlock):
            raise ValueError("cross: an EncoderBlock has no context; use DecoderBlock")
        self.config = config
        self.attention_norm = self._norm()
        self.attention = MultiHeadAttention(config.attention)
        self.feed_forward: FeedForward | None = None
        if config.hidden_width:
            if config.placement != "parallel":
                self.feed_forward_norm = self._norm()
            self.feed_forward = FeedForward(
                config.width,
                config.hidden_width,
                config.activation,
                dropout=config.feed_forward_dropout,
                bias=config.bias,
            )
        self.dropout = nn.Dropout(config.dropout)

    @advised
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
        offset: Offset | None = None,
        cache: LayerCache | None = None,
        positions: nn.Module | None = None,
        observe: Observer | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Any]:
        """x (B, L, E) to (B, L, E); all else as in `MultiHeadAttention`, in self-attention."""
        given: dict[str, Any] = dict(bias=bias, padding=padding, offset=offset, cache=cache, positions=positions)
        if return_weights:
            check_weights(self.config.attention, x)
            return self._weighed(x, mask, observe, given)
        if isinstance(x, Tensor) and x.is_nested:
            refuse_with_nested(padding=padding, offset=offset, cache=cache)
            return through_nested(self, x, mask, self.config.attention, bias=bias, positions=positions, observe=observe)
        check_tokens("x", x, self.config.width)
        x = x if padding is None else fill_padding(x, padding)

        def attend(x: Tensor) -> Tensor:
            return self.attention(x, mask, observe=observe, **given)

        if self.config.placement == "parallel":
            normed = self.attention_norm(x)
            read = attend(normed)
            return x + dropped(self.dropout, read if self.feed_forward is None else read + self.feed_forward(normed))

        def summed(x: Tensor, norm: RowNorm) -> Tensor | None:
            return self.attention._normed_sum(x, norm, mask, observe=observe, **given)

        return self._with_feed_forward(self._with_residual(x, self.attention_norm, attend, summed))

    def _weighed(
        self, x: Tensor, mask: Mask | Tensor | None, observe: Observer | None, given: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """The output and the weights of its attention; with cross-attention a pair (own, of the context) of weights."""
        calls: list[Observation] = []

        def both(call: Observation) -> None:
            calls.append(call)
            if observe is not None:
                observe(call)

        out = self.forward(x, mask, observe=both, **given)
        weights = tuple(weights_of(call) for call in calls)
        return cast(Tensor, out), weights if len(weights) > 1 else weights[0]

    def reset_parameters(self) -> None:
        """Draw all weights anew, as they were drawn at first."""
        for part in self.children():
            begin_anew(part)

    def writers(self) -> list[nn.Linear]:
        """The layers that write into the residual stream."""
        return [self.attention.output, *([] if self.feed_forward is None else [self.feed_forward.down])]

    def _with_feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward half of the block, unless it is left out."""
        layer = self.feed_forward
        return x if layer is None else self._with_residual(x, self.feed_forward_norm, layer, layer._normed_sum)

    def _with_residual(
        self,
        x: Tensor,
        norm: nn.Module,
        layer: Callable[[Tensor], Tensor],
        summed: Callable[[Tensor, RowNorm], Tensor | None] | None = None,
    ) -> Tensor:
        """A layer around which the residual stream runs, normalised before or after. `summed(x, norm)` is
        norm(x + layer(x)) or None."""
        if self.config.placement == "pre":
            return x + dropped(self.dropout, layer(norm(x)))
        after = layer_norm(norm) if summed is not None and unread(self.dropout, norm) else None
        out = None if summed is None or after is None else summed(x, after)
        return norm(x + dropped(self.dropout, layer(x))) if out is None else out

    def _norm(self) -> nn.Module:
        config = self.config
        return make_norm(config.norm, config.width, bias=config.bias, eps=config.eps)


class DecoderBlock(EncoderBlock):
    """One layer of a decoder: (B, L, E) -> (B, L, E); an `EncoderBlock` that may also read a context (`config.cross`).

        pre   y = x + attention(norm(x));  z = y + cross(norm(y), context);  out = z + feed_forward(norm(z))
        post  y = norm(x + attention(x));  z = norm(y + cross(y, context));  out = norm(z + feed_forward(z))

    Vaswani et al. (2017), section 3.1. The block is causal only by its mask: `Causal()`, which `Decoder` gives.

    Example:
        >>> import torch, saccade
        >>> attention = saccade.nn.AttentionConfig(16, heads=4)
        >>> block = saccade.nn.DecoderBlock(saccade.nn.BlockConfig(attention, cross=attention))
        >>> block(torch.randn(2, 5, 16), saccade.Causal(), context=torch.randn(2, 7, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, config: BlockConfig):
        super().__init__(config)
        if config.cross is not None:
            self.cross_norm = self._norm()
            # Not fused by default: queries and the rest come from different tokens, so one product serves neither.
            fused = False if config.cross.fused is None else config.cross.fused
            self.cross = MultiHeadAttention(replace(config.cross, fused=fused))

    @advised
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        context: Context | Tensor | None = None,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
        offset: Offset | None = None,
        cache: LayerCache | None = None,
        positions: nn.Module | None = None,
        observe: Observer | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Any]:
        """x (B, L, E) to (B, L, E).

        `context` is what cross-attention reads, (B, Lc, C) or a `Context` with a mask of its own; `Context` says when
        it may have fewer items than x. All else is as in `MultiHeadAttention`, in self-attention. `return_weights`
        gives with a context two, (own, of the context).
        """
        given: dict[str, Any] = dict(bias=bias, padding=padding, offset=offset, cache=cache, positions=positions)
        if return_weights:
            for config in filter(None, (self.config.attention, self.config.cross)):
                check_weights(config, x)
            return self._weighed(x, mask, observe, {**given, "context": context})
        given["observe"] = observe
        if (context is None) != (self.config.cross is None):
            has = "has no cross-attention" if self.config.cross is None else "needs one"
            raise ValueError(f"context: this block {has} (BlockConfig.cross)")
        if context is None:
            return super().forward(x, mask, **given)
        if isinstance(x, Tensor) and x.is_nested:
            refuse_with_nested(context=context)
        check_tokens("x", x, self.config.width)
        x = x if padding is None else fill_padding(x, padding)
        where = context if isinstance(context, Context) else Context(context)
        x = self._with_residual(x, self.attention_norm, lambda x: self.attention(x, mask, **given))

        def read(x: Tensor) -> Tensor:
            # Items that read one context are rows of one call, since no row sees another there.
            rows = x.reshape(where.tokens.shape[0], -1, x.shape[-1]) if len(x) > len(where.tokens) else x
            return self.cross(rows, where.mask, context=where.tokens, cache=where.cache, observe=observe).view_as(x)

        return self._with_feed_forward(self._with_residual(x, self.cross_norm, read))

    def writers(self) -> list[nn.Linear]:
        return super().writers() + ([] if self.config.cross is None else [self.cross.output])
