"""Multi-head attention as a module.

Shapes: B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, D key width, Dv value width, E model width, C context width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._attention import attention
from .._biases import Bias
from .._masks import Mask, Padding, as_mask
from ..batching import fill_padding
from ..positions import Offset, Rotary
from ._initial import by_fan_in
from ._ragged import refuse_with_nested, through_packed
from .cache import ContextLayer, GrowingLayer, LayerCache, Seen
from .config import AttentionConfig
from .norm import make_norm


class Observation(NamedTuple):
    """One attention call: what went into `saccade.attention`, and what came out of it."""

    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask | None
    bias: Tensor | Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None  # (Hq,)
    out: Tensor  # (B, Hq, Lq, Dv), before gate and output projection
    cross: bool  # whether keys came from a context


Observer = Callable[[Observation], None]


class MultiHeadAttention(nn.Module):
    """Attention with several heads: project to q, k, v; attend; project back. (B, Lq, E) -> (B, Lq, E).

        out = concat_h(attention(x Wq_h, c Wk_g, c Wv_g)) Wo,   g = h // (Hq // Hkv),   c = x or a context

    Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2; fewer key/value heads: Ainslie et al., "GQA"
    (2023). Everything else is a value in the configuration, with its paper.

    `projection` holds Wq, Wk, Wv one below the other: rows [0, Hq D), then Hkv D, then Hkv Dv; not fused they are
    `query`, `key` and `value`. They start by fan-in: tokens of variance 1 have logits of variance near 1.

    Args:
        config: what it is made of.
    """

    def __init__(self, config: AttentionConfig):
        super().__init__()
        self.config = config
        queries, keys, values = config.sizes
        self.widths = widths = config.widths
        if config.fused:
            self.projection = nn.Linear(config.width, queries + keys + values, bias=config.bias)
        else:
            self.query = nn.Linear(config.width, queries, bias=config.bias)
            self.key = nn.Linear(widths.context, keys, bias=config.bias)
            self.value = nn.Linear(widths.values, values, bias=config.bias)
        read = config.heads * widths.value_head
        self.output = nn.Linear(read, config.width, bias=bool(config.output_bias))
        self.gate = nn.Linear(config.width, read, bias=False) if config.gate else None
        self.query_norm, self.key_norm = _head_norm(config), _head_norm(config)
        self.sink = nn.Parameter(torch.zeros(config.heads)) if config.sink else None
        self.positions = None if config.positions is None else config.positions.build(config.heads, widths.head)
        by_fan_in(self)

    def forward(
        self, x: Tensor, mask: Mask | Tensor | None = None, *, context: Tensor | None = None,
        values: Tensor | None = None, bias: Tensor | Bias | None = None, padding: Padding | None = None,
        offset: Offset | None = None, cache: LayerCache | ContextLayer | None = None,
        positions: nn.Module | None = None, observe: Observer | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from `x` to `x` itself or to `context`.

        Args:
            x: (B, Lq, E), or a nested tensor (B, j, E) with the jagged layout, in self-attention without a cache.
            mask: who sees whom, True = attend; of the whole sequence, also with a cache. None shows everything.
            context: (B, Lk, C), what keys and values are made from; None is `x`: self-attention.
            values: (B, Lk, values_width), what values are made from where that is not the context.
            bias: added to the logits, as in `saccade.attention`.
            padding: the real tokens of `x` in self-attention. Others are neither attended nor counted as positions,
                on whichever side they stand, and their rows attend to nothing.
            offset: position of the first token (int, or (B,)) or of each (B, Lq); None counts from 0, or goes on from
                the cache.
            cache: tokens decoded so far, which `x` joins; with a context, where its keys and values are kept.
            positions: the module a stack shares among its layers; None is this module's own.
            observe: called with the `Observation` of this call.

        Returns:
            (B, Lq, E), nested like `x`.

        Raises:
            ValueError: widths that do not fit, positions across two sequences, a cache of another batch or module.
        """
        if x.is_nested:
            refuse_with_nested(context=context, values=values, padding=padding, offset=offset, cache=cache)
            return through_packed(self, x, mask, bias=bias, positions=positions, observe=observe)
        self._check(x, context, values)
        x = x if padding is None else fill_padding(x, padding)  # 0 * NaN would reach the gradients of the weights
        mask = self._windowed(as_mask(mask))
        positions = self.positions if positions is None else positions
        if context is None:
            query, seen = self._within(x, Seen(x, x, mask, bias), padding, offset, cache, positions)
        else:
            refuse_across(positions=positions, padding=padding, offset=offset)
            query, key, value = self._across(x, context, context if values is None else values, cache)
            seen = Seen(key, value, mask, bias)
        out = self._attend(query, seen)
        if observe is not None:
            config = self.config
            observe(Observation(query, *seen, config.scale, config.softcap, self.sink, out, context is not None))
        out = out.transpose(1, 2).flatten(2)
        return self.output(out if self.gate is None else out * self.gate(x).sigmoid())

    def _attend(self, query: Tensor, seen: Seen) -> Tensor:
        """(B, Hq, Lq, Dv)."""
        config = self.config
        return attention(
            query, seen.key, seen.value, seen.mask, bias=seen.bias, scale=config.scale, softcap=config.softcap,
            sink=self.sink, dropout=config.dropout if self.training else 0.0,
        )  # fmt: skip

    def _within(
        self, x: Tensor, seen: Seen, padding: Padding | None, offset: Offset | None,
        cache: LayerCache | ContextLayer | None, positions: nn.Module | None,
    ) -> tuple[Tensor, Seen]:  # fmt: skip
        """Self-attention: queries (B, Hq, Lq, D), and what they see: these tokens and those in the cache."""
        if isinstance(cache, ContextLayer):
            raise TypeError("cache: expected a LayerCache for self-attention, got a ContextLayer (of a context)")
        if cache is None and padding is not None:
            cache = GrowingLayer()  # an empty one knows how to place a padded batch
        query, key, value = self._within_projected(x)
        bias = seen.bias
        if isinstance(positions, Rotary):
            if offset is None:
                offset = 0 if cache is None else cache.offset(x.shape[1], padding)
            query, key = positions(query, offset), positions(key, offset)
        elif positions is not None:
            if bias is not None:
                raise ValueError(f"bias: the module adds {type(positions).__name__}'s already, and a call takes one")
            bias = positions()
        if cache is None:
            return query, Seen(key, value, seen.mask, bias)
        return query, cache.append(key, value, seen.mask, bias, padding)

    def _across(
        self, x: Tensor, context: Tensor, values: Tensor, cache: LayerCache | ContextLayer | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-attention: queries of `x`, keys and values of the context, projected once where there is a cache."""
        if cache is None:
            return self._queries(x), *self._keys_values(context, values)
        if not isinstance(cache, ContextLayer):
            raise TypeError(f"cache: expected a ContextLayer for a context, got {type(cache).__name__}")
        return self._queries(x), *cache.get(lambda: self._keys_values(context, values))

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of query, key and value, fused or not."""
        if not self.config.fused:
            return [(layer.weight, layer.bias) for layer in (self.query, self.key, self.value)]
        weights = self.projection.weight.split(self.config.sizes)
        biases = (None,) * 3 if self.projection.bias is None else self.projection.bias.split(self.config.sizes)
        return list(zip(weights, biases, strict=True))

    def _within_projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, L, D), keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of the same tokens."""
        if not self.config.fused:
            return self._queries(x), *self._keys_values(x, x)
        query, key, value = self.projection(x).split(self.config.sizes, dim=-1)
        return self.query_norm(self._heads(query)), self.key_norm(self._heads(key)), self._value_heads(value)

    def _queries(self, x: Tensor) -> Tensor:
        return self.query_norm(self._heads(F.linear(x, *self.matrices()[0])))

    def _keys_values(self, context: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        _, of_key, of_value = self.matrices()
        return self.key_norm(self._heads(F.linear(context, *of_key))), self._value_heads(F.linear(values, *of_value))

    def _heads(self, features: Tensor) -> Tensor:
        """(B, L, H D) to (B, H, L, D)."""
        return features.unflatten(-1, (-1, self.widths.head)).transpose(1, 2)

    def _value_heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (-1, self.widths.value_head)).transpose(1, 2)

    def _windowed(self, mask: Mask | None) -> Mask | None:
        window = self.config.window
        return mask if window is None else window if mask is None else mask & window

    def _check(self, x: Tensor, context: Tensor | None, values: Tensor | None) -> None:
        config, widths = self.config, self.widths
        if context is None and values is not None:
            raise ValueError("values: given without a context")
        if context is None and not config.width == widths.context == widths.values:
            raise ValueError(
                f"context: needed, since keys are made from tokens {widths.context} wide and values from "
                f"tokens {widths.values} wide, while x is {config.width} wide"
            )
        if context is not None and values is None and widths.values != widths.context:
            raise ValueError(f"values: needed, since values are made from tokens {widths.values} wide")
        check_tokens("x", x, config.width)
        for name, tokens, width in (("context", context, widths.context), ("values", values, widths.values)):
            if tokens is not None:
                check_tokens(name, tokens, width)
                if tokens.shape[0] != x.shape[0]:
                    raise ValueError(f"{name}: has batch {tokens.shape[0]}, expected x's {x.shape[0]}")

    def extra_repr(self) -> str:
        config = self.config
        kv = "" if config.kv_heads == config.heads else f", kv_heads={config.kv_heads}"
        return f"width={config.width}, heads={config.heads}{kv}"


def _head_norm(config: AttentionConfig) -> nn.Module:
    return nn.Identity() if config.qk_norm is None else make_norm(config.qk_norm, config.widths.head)


def check_tokens(name: str, x: Tensor, width: int) -> None:
    """ValueError unless `x` is (batch, length, width)."""
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"{name}: expected shape (batch, length, {width}), got {tuple(x.shape)}")


def refuse_across(**given: object) -> None:
    """ValueError for what has no meaning between two sequences."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: is of one sequence, and cross-attention has two (padding goes into the mask)")
