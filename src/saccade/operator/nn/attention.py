"""Multi-head attention as a module.

Shape legend: B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, D key width, Dv value width, E model width, C context
width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._attention import attention
from .._biases import Bias, as_bias
from .._call import ObservedCall
from .._int8 import RowNorm
from .._int8_rows import as_floats
from .._masks import Mask, Padding, as_mask
from .._products import in_one_pass
from .._scores._score import Score
from .._unknown_arguments import advised
from .._weights import Chosen, attention_weights
from ..batching import fill_padding
from ..positions import Offset, Rotary
from ..variants import Mechanism, Recurrent
from ._initial import begin_anew, by_fan_in
from ._linear import Linear
from ._ragged import refuse_with_nested, through_nested
from ._rounded import RoundedLinear
from .cache import (
    BlockSumsLayer,
    CachedInputs,
    ContextLayer,
    GrowingLayer,
    KVCache,
    LayerCache,
    RecurrentLayer,
    StreamingLayer,
)
from .cache.aligning import AlignedItems
from .config import AttentionConfig, check_cross, reason
from .feed_forward import unread
from .masking import first_position, joined, of_context, real_context, without_cache
from .norm import make_norm


@dataclass(frozen=True, eq=False, kw_only=True)
class Observation(ObservedCall):
    """One attention call: the inputs of `saccade.attention`, and its outputs before gate and output projection.

    With a cache, keys are those it holds; where items are padded on the left and the mask names places, tokens stand
    from key 0 on, while queries stay in their rows.

    Example:
        >>> import torch, saccade
        >>> layer, seen = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4)), []
        >>> out = layer(torch.randn(2, 5, 16), observe=seen.append)
        >>> seen[0].query.shape, seen[0].out.shape
        (torch.Size([2, 4, 5, 4]), torch.Size([2, 4, 5, 4]))
    """

    cross: bool = False  # whether keys came from a context
    mechanism: Mechanism | None = None  # what read them; None: softmax attention


Observer = Callable[[Observation], None]


def weights_of(observed: Observation, rows: Chosen = None) -> Tensor:
    """The exact weights (B, Hq, Lq or rows, Lk) of a call of softmax attention, before dropout."""
    return attention_weights(observed.query, observed.key, rows=rows, **observed.scoring())


def check_weights(config: AttentionConfig, x: object) -> None:
    """ValueError if the attention has no weights, or if they do not fit into one tensor."""
    if config.mechanism is not None:
        raise ValueError(f"return_weights: not with the mechanism {config.mechanism.name!r}, which has no such weights")
    if isinstance(x, Tensor) and x.is_nested:
        raise ValueError("return_weights: not with a nested batch, whose items have weights of unequal sizes; pad it")


class HeadsLeft(NamedTuple):
    """The heads that an attention layer has left after pruning (`saccade.prune`), by their original numbers."""

    numbers: tuple[int, ...]
    original_heads: int


class MultiHeadAttention(nn.Module):
    """Attention with several heads: project to q, k, v; attend; project back. (B, Lq, E) -> (B, Lq, out_width).

        out = concat_h(attention(x Wq_h, c Wk_g, c Wv_g)) Wo,   g = h // (Hq // Hkv),   c = x or a context

    Vaswani et al., "Attention Is All You Need" (2017), section 3.2.2; fewer key/value heads: Ainslie et al., "GQA"
    (2023). Everything else is a value in the configuration, with its paper.

    `projection` holds Wq, Wk, Wv one below the other: rows [0, Hq D), then Hkv D, then Hkv Dv; not fused they are
    `query`, `key` and `value`. They start by fan-in, queries divided by `scale sqrt(D)`, so that tokens of variance 1
    have logits of variance near 1 whatever the scale is.

    Args:
        config: what it is made of.

    Attributes:
        heads_left: the heads that `saccade.prune` left. A bias made for all heads, such as one of positions that layers
            share, is read for these. None: nothing was removed.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(32, heads=4, kv_heads=2, positions=saccade.positions.RotaryConfig())
        >>> layer = saccade.nn.MultiHeadAttention(config)
        >>> out, weights = layer(torch.randn(2, 5, 32), saccade.Causal(), return_weights=True)
        >>> out.shape, weights.shape
        (torch.Size([2, 5, 32]), torch.Size([2, 4, 5, 5]))
    """

    heads_left: HeadsLeft | None = None

    def __init__(self, config: AttentionConfig):
        super().__init__()
        if not isinstance(config, AttentionConfig):
            raise TypeError(f"config: expected AttentionConfig, got {type(config).__name__}")
        self.config, self.shape = config, config.shape
        self.sizes = queries, keys, values = config.sizes
        if self.shape.fused:
            self.projection = Linear(config.width, queries + keys + values, bias=config.bias)
        else:
            self.query = Linear(config.width, queries, bias=config.bias)
            if keys:
                self.key = Linear(self.shape.context, keys, bias=config.bias)
            self.value = Linear(self.shape.values, values, bias=config.bias)
        read = config.heads * self.shape.value_head
        self.output = Linear(read, self.shape.out, bias=self.shape.output_bias)
        self.gate = Linear(config.width, read, bias=False) if config.gate else None
        self.query_norm, self.key_norm = _head_norm(config), _head_norm(config)
        self.sink = nn.Parameter(torch.empty(config.heads)) if config.sink else None
        scheme = config.positions
        self.positions = None if scheme is None else scheme.build(config.heads, self.shape.head)
        self.mechanism = None if config.mechanism is None else config.mechanism.build(config.heads_for_mechanism())
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew, as they were drawn at first."""
        by_fan_in(self)
        for module in (self.query_norm, self.key_norm, self.positions, self.mechanism):
            begin_anew(module)
        if self.config.scale:
            for part in self.matrices()[0]:
                if part is not None:
                    part.div_(abs(self.config.scale) * self.shape.head**0.5)
        if self.mechanism is not None:
            self.mechanism.begin_from(self.matrices())
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    @advised
    def forward(
        self,
        x: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        context: Tensor | None = None,
        values: Tensor | None = None,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
        offset: Offset | None = None,
        cache: LayerCache | ContextLayer | None = None,
        positions: nn.Module | None = None,
        observe: Observer | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `x` to `x` itself or to `context`.

        Args:
            x: (B, Lq, E), or a nested tensor (B, j, E) with the jagged layout, in self-attention without a cache.
            mask: who sees whom, True = attend; None shows everything. With a cache it is the mask of the whole
                sequence. To a context, `Padding(lengths)` says what of it is real; what is not real is not read.
            context: (B, Lk, C), what keys and values are made from; None is `x`: self-attention.
            values: (B, Lk, values_width), what values are made from where that is not the context.
            bias: added to the logits, as in `saccade.attention`.
            padding: the real tokens of `x` in self-attention. Others are neither attended nor counted as positions,
                on whichever side they stand, and their rows attend to nothing. With padding on the left, a mask or bias
                that is data about rows (tensors, ids) would have to say which rows it means, and raises an error.
            offset: position of the first token (int, or (B,)) or of each (B, Lq); None counts from 0, or goes on from
                the cache.
            cache: tokens decoded so far, which `x` joins; with a context, where its keys and values are kept.
            positions: the module a stack shares among its layers; None is this module's own.
            observe: called with the `Observation` of this call.
            return_weights: whether to return the weights, too. In training they are those before dropout.

        Returns:
            (B, Lq, out_width), nested like `x`; with `return_weights` also the weights (B, Hq, Lq, Lk), differentiable.

        Raises:
            TypeError: not a tensor, or one of another dtype than the weights (outside of autocast).
            ValueError: widths that do not fit, positions across two sequences, a cache of another batch or module;
                weights of a mechanism or of a nested batch.
        """
        if return_weights:
            check_weights(self.config, x)
        if isinstance(x, Tensor) and x.is_nested:
            refuse_with_nested(context=context, values=values, padding=padding, offset=offset, cache=cache)
            return through_nested(self, x, mask, self.config, bias=bias, positions=positions, observe=observe)
        given: dict[str, Any] = dict(context=context, values=values, bias=bias, padding=padding, offset=offset)
        given |= dict(cache=cache, positions=positions, observe=observe, return_weights=return_weights)
        x, out, weights = self._read(x, mask, **given)
        projected = self._projected_out(out, x)
        return projected if weights is None else (projected, weights)

    def _read(
        self,
        x: Tensor,
        mask: Mask | Tensor | None,
        context: Tensor | None = None,
        values: Tensor | None = None,
        bias: Tensor | Bias | None = None,
        padding: Padding | None = None,
        offset: Offset | None = None,
        cache: LayerCache | ContextLayer | None = None,
        positions: nn.Module | None = None,
        observe: Observer | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """All but the last product: x without what padding holds, the heads' outputs (B, heads, Lq, Dv), weights."""
        self._check(x, context, values)
        if padding is not None and context is None:
            x = fill_padding(x, padding)  # 0 * NaN would reach the gradients of the weights
        mask = joined(as_mask(mask), self.config.window)
        positions = self.positions if positions is None else positions
        if context is None and isinstance(cache, RecurrentLayer):
            if observe is not None:
                raise ValueError(
                    "observe: not supported with a recurrent state, which has no keys and values; use no cache"
                )
            return x, self._attend_state(x, mask, bias, padding, offset, cache, positions), None
        place = None
        if context is None:
            query, seen, place = self._within(x, CachedInputs(x, x, mask, bias), padding, offset, cache, positions)
        else:
            refuse_across(positions=positions, padding=padding, offset=offset)
            check_cross(self.config)
            mask = of_context(mask)
            query, key, value = self._across(x, mask, context, values, cache)
            seen = CachedInputs(key, value, mask, bias)
        if self.heads_left is not None:
            seen = seen._replace(bias=_of_heads(seen.bias, self.heads_left))
        if self.mechanism is not None or observe is not None or return_weights:
            seen = seen.in_floats(query.dtype)
        out = self._attend(query, seen, x, place, cache)
        if observe is None and not return_weights:
            return x, out, None
        observation = Observation(
            query,
            as_floats(seen.key, query.dtype),
            as_floats(seen.value, query.dtype),
            seen.mask,
            seen.bias,
            self.config.scale,
            self.config.softcap,
            self.sink,
            out=out,
            source="saccade.attention",
            cross=context is not None,
            mechanism=self.mechanism,
        )
        if observe is not None:
            observe(observation)
        return x, out, weights_of(observation) if return_weights else None

    def cache(self) -> LayerCache:
        """An empty cache for decoding: keys and values that grow, or the state of a recurrent mechanism.

        Raises:
            ValueError: the mechanism has no way to decode token by token.
        """
        if isinstance(self.mechanism, Recurrent):
            return RecurrentLayer(self.mechanism)
        self._check_cached()
        block = None if self.mechanism is None else self.mechanism.summed_block
        return GrowingLayer() if block is None else BlockSumsLayer(block)

    def _check_cached(self) -> None:
        """ValueError if decoding with cached keys and values would differ from the parallel form."""
        mechanism = self.config.mechanism
        if mechanism is not None and mechanism.traits.cached is not True:
            raise ValueError(
                f"cache: the mechanism {mechanism.name!r} cannot decode from keys and values, "
                f"{reason(mechanism.traits.cached)}"
            )

    def _projected_out(self, out: Tensor, x: Tensor) -> Tensor:
        """(B, heads, Lq, Dv) to (B, Lq, out_width)."""
        return self.output(self._joined_heads(out, x))

    def _joined_heads(self, out: Tensor, x: Tensor) -> Tensor:
        out = out.transpose(1, 2).flatten(2)
        return out if self.gate is None else out * self.gate(x).sigmoid()

    def _normed_sum(self, x: Tensor, norm: RowNorm, mask: Mask | Tensor | None, **given: Any) -> Tensor | None:
        """`norm(x + self(x, mask, **given))` with sum and norm in the last product; None if that is not in 8 bits, or
        if hooks read what is between."""
        hooked = self._forward_pre_hooks or self._forward_hooks or "forward" in vars(self)
        if type(self) is not MultiHeadAttention or hooked or not (unread(self.output) and self.output.reads_int8):
            return None
        _, out, _ = self._read(x, mask, **given)
        heads = self._joined_heads(out, x)
        ended = in_one_pass([self.output], heads, None, ("add", x), norm)
        return norm(x + self.output(heads)) if ended is None else ended

    def _attend_state(
        self,
        x: Tensor,
        mask: Mask | None,
        bias: Tensor | Bias | None,
        padding: Padding | None,
        offset: Offset | None,
        cache: RecurrentLayer,
        positions: nn.Module | None,
    ) -> Tensor:
        """Self-attention of new tokens to a state, (B, heads, L, Dv)."""
        if cache.mechanism is not self.mechanism:
            raise ValueError("cache: it is another module's; a RecurrentLayer serves the module that made it (cache())")
        if bias is not None or not isinstance(positions, Rotary | None):
            raise ValueError(
                "bias: not supported with a recurrent state, which has no scores to add it to; use no cache"
            )
        query, key, value = self._projected(x)
        if isinstance(positions, Rotary):
            offset = cache.offset(x.shape[1], padding) if offset is None else offset
            query, key = positions(query, offset), positions(key, offset)
        reads_tokens = self.config.mechanism is not None and self.config.mechanism.reads_tokens
        return cache.advance(query, key, value, mask, padding, **({"tokens": x} if reads_tokens else {}))

    def _attend(
        self,
        query: Tensor,
        cached: CachedInputs,
        tokens: Tensor,
        place: AlignedItems | None,
        cache: LayerCache | ContextLayer | None,
    ) -> Tensor:
        """(B, heads, Lq, Dv)."""
        config = self.config
        options: dict[str, Any] = dict(
            bias=cached.bias,
            scale=config.scale,
            softcap=config.softcap,
            sink=self.sink,
            dropout=config.dropout if self.training else 0.0,
        )
        if self.mechanism is None or config.mechanism is None:
            return attention(query, cached.key, cached.value, cached.mask, **options)
        name, takes = config.mechanism.name, config.mechanism.traits.takes
        if cached.bias is not None and "bias" not in takes:
            raise ValueError(f"bias: the mechanism {name!r} has no logits to add it to")
        options = {option: options[option] for option in takes}
        if config.mechanism.reads_tokens:
            options["tokens"] = tokens
        if isinstance(cache, BlockSumsLayer) and cache.block == self.mechanism.summed_block:
            options["sums"] = cache.sums()
        if place is None:
            return self.mechanism(query, cached.key, cached.value, cached.mask, **options)
        if options.get("bias") is not None:
            raise ValueError(f"bias: not with {name!r} and a cache of items of unequal length, which moves the rows")
        if "tokens" in options:
            options["tokens"] = place.rows_at_the_end(tokens[:, None])[:, 0]
        key, value = (as_floats(rows, query.dtype) for rows in cached[:2])
        query, key, value, mask = place.at_the_end(query, key, value)
        return place.back(self.mechanism(query, key, value, mask, **options))

    def _within(
        self,
        x: Tensor,
        cached: CachedInputs,
        padding: Padding | None,
        offset: Offset | None,
        cache: LayerCache | ContextLayer | None,
        positions: nn.Module | None,
    ) -> tuple[Tensor, CachedInputs, AlignedItems | None]:
        """The inputs of self-attention: queries (B, Hq, Lq, D); keys and values of the new and the cached tokens; and
        the positions of the queries, if a mechanism that does not support placed masks needs them."""
        if cache is not None:
            if not isinstance(cache, LayerCache):
                hint = " (give cache[layer])" if isinstance(cache, KVCache) else ""
                raise TypeError(f"cache: expected a LayerCache for self-attention, got {type(cache).__name__}{hint}")
            self._check_cached()
        bias, mask = cached.bias, cached.mask
        if padding is not None and cache is None:
            mask, cache = without_cache(mask, bias, padding)
        mechanism, place = self.config.mechanism, None
        if cache is not None and mechanism is not None and mechanism.traits.masks is not True:
            place = AlignedItems.of(cache, mask, padding, x.shape[1], mechanism.name)
        query, key, value = self._projected(x)
        if isinstance(positions, Rotary) and isinstance(cache, StreamingLayer):
            if offset is not None:
                raise ValueError("offset: a StreamingLayer counts positions within itself, so none can be given")
            return *cache.turned(query, key, value, mask, bias, padding, positions), None
        if isinstance(positions, Rotary):
            if offset is None:
                offset = self._first_position(padding) if cache is None else cache.offset(x.shape[1], padding)
            query, key = positions(query, offset), positions(key, offset)
        elif positions is not None:
            if bias is not None:
                raise ValueError(f"bias: the module adds {type(positions).__name__}'s already, and a call takes one")
            bias = positions()
        if cache is None:
            return query, CachedInputs(key, value, mask, bias), None
        return query, cache.append(key, value, mask, bias, padding), place

    def _first_position(self, padding: Padding | None) -> Offset:
        """Position of row 0 without a cache.

        Softmax attention reads rotary positions by their distances, which padding on the left leaves as they are. A
        mechanism may read each by itself: features of a turned key, hashes of it.
        """
        return 0 if padding is None or self.mechanism is None else first_position(padding)

    def _across(
        self,
        x: Tensor,
        mask: Mask | None,
        context: Tensor,
        values: Tensor | None,
        cache: LayerCache | ContextLayer | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-attention: queries of `x`, keys and values of the context, projected once where there is a cache."""

        def project() -> tuple[Tensor, Tensor]:
            return self._keys_values(*real_context(mask, context, values))

        if cache is None:
            return self._queries(x), *project()
        if not isinstance(cache, ContextLayer):
            raise TypeError(f"cache: expected a ContextLayer for a context, got {type(cache).__name__}")
        key, value = cache.get(project, x.shape[0])
        held, expected = key.shape[1:], (self.shape.key_heads, context.shape[1], self.shape.head)
        if held != expected:
            raise ValueError(
                f"cache: it holds a context of (heads, length, width) {tuple(held)}, expected {expected}: it serves "
                "one module and one context"
            )
        return self._queries(x), key, value

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of query, key and value, fused or not; a key's has no rows where keys are the queries."""
        if not self.shape.fused:
            of_query, of_value = ((layer.weight, layer.bias) for layer in (self.query, self.value))
            of_key = (self.key.weight, self.key.bias) if self.sizes[1] else (of_query[0][:0], None)
            return [of_query, of_key, of_value]
        weights = self.projection.weight.split(self.sizes)
        biases = (None,) * 3 if self.projection.bias is None else self.projection.bias.split(self.sizes)
        return list(zip(weights, biases, strict=True))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, L, D), keys (B, Hkv, L, D) and values (B, Hkv, L, Dv) of the same tokens."""
        if not self.shape.fused:
            return self._queries(x), *self._keys_values(x, x)
        query, key, value = self.projection(x).split_with_sizes(self.sizes, -1)
        heads = self._split_heads(query)
        key_heads = self._split_heads(key) if self.sizes[1] else heads
        if self.config.qk_norm is None:
            return heads, key_heads, self._value_heads(value)
        return self.query_norm(heads), self.key_norm(key_heads), self._value_heads(value)

    def _part(self, tokens: Tensor, part: int) -> Tensor:
        """Queries (0), keys (1) or values (2) of a fused projection, before norms."""
        if isinstance(self.projection, RoundedLinear):  # its rows are packed together
            return self.projection(tokens).split_with_sizes(self.sizes, -1)[part]
        return F.linear(tokens, *self.matrices()[part])

    def _queries(self, x: Tensor) -> Tensor:
        features = self._part(x, 0) if self.shape.fused else self.query(x)
        return self.query_norm(self._split_heads(features))

    def _keys_values(self, context: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.shape.fused:
            key, value = self._part(context, 1 if self.sizes[1] else 0), self._part(values, 2)
        else:
            # Keys that are the queries are made by the queries' matrix.
            key, value = (self.key if self.sizes[1] else self.query)(context), self.value(values)
        return self.key_norm(self._split_heads(key)), self._value_heads(value)

    def _split_heads(self, features: Tensor) -> Tensor:
        """(B, L, H D) to (B, H, L, D)."""
        return _heads(features, self.shape.head)

    def _value_heads(self, features: Tensor) -> Tensor:
        return _heads(features, self.shape.value_head)

    def _check(self, x: Tensor, context: Tensor | None, values: Tensor | None) -> None:
        config, shape = self.config, self.shape
        if context is None and values is not None:
            raise ValueError("values: given without a context")
        if context is None and not config.width == shape.context == shape.values:
            raise ValueError(
                f"context: needed, since keys are made from tokens {shape.context} wide and values from "
                f"tokens {shape.values} wide, while x is {config.width} wide"
            )
        if context is not None and values is None and shape.values != shape.context:
            raise ValueError(f"values: needed, since values are made from tokens {shape.values} wide")
        weight = self.output.weight
        check_tokens("x", x, config.width, weight)
        for name, tokens, width in (("context", context, shape.context), ("values", values, shape.values)):
            if tokens is not None:
                check_tokens(name, tokens, width, weight)
                if tokens.shape[0] != x.shape[0]:
                    raise ValueError(f"{name}: has batch {tokens.shape[0]}, expected x's {x.shape[0]}")
                if context is not None and tokens.shape[1] != context.shape[1]:
                    raise ValueError(f"{name}: has length {tokens.shape[1]}, expected the context's {context.shape[1]}")

    def extra_repr(self) -> str:
        config = self.config
        kv = "" if self.shape.kv_heads == config.heads else f", kv_heads={self.shape.kv_heads}"
        out = "" if self.shape.out == config.width else f", out_width={self.shape.out}"
        return f"width={config.width}, heads={config.heads}{kv}{out}"


def _heads(features: Tensor, width: int) -> Tensor:
    """(B, L, H D) to (B, H, L, D)."""
    batch, length, whole = features.shape
    return features.view(batch, length, whole // width, width).transpose(1, 2)


def _of_heads(bias: Tensor | Bias | None, left: HeadsLeft) -> Tensor | Bias | None:
    """The bias of the remaining heads, from a bias with all heads or a `Score`. A bias that all heads share is returned
    unchanged."""
    held = as_bias(bias)
    ours = held is not None and (isinstance(held, Score) or held.heads == left.original_heads)
    return held._of_heads(left.numbers) if held is not None and ours else bias


def _head_norm(config: AttentionConfig) -> nn.Module:
    return nn.Identity() if config.qk_norm is None else make_norm(config.qk_norm, config.shape.head, eps=config.eps)


def check_tokens(name: str, x: object, width: int, weight: Tensor | None = None) -> None:
    """TypeError unless `x` is a tensor of the weight's dtype, ValueError unless it is (batch, length, width) there."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor (batch, length, {width}), got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name}: a nested tensor is supported only in self-attention; pad it (saccade.batching)")
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"{name}: expected shape (batch, length, {width}), got {tuple(x.shape)}")
    if weight is None or not weight.is_floating_point():
        return
    if x.device != weight.device:
        raise ValueError(f"{name}: is on {x.device}, expected the module's device {weight.device}")
    if x.dtype == weight.dtype:
        return
    kind = x.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.is_floating_point()):
        raise TypeError(f"{name}: is {x.dtype}, expected the module's {weight.dtype}")


def refuse_across(**given: object) -> None:
    """ValueError for arguments that describe one sequence, since cross-attention has two."""
    for name, value in given.items():
        if value is not None:
            problem = "describes one sequence, and cross-attention has two"
            raise ValueError(f"{name}: {problem}; leave it out (padding goes into the mask)")
