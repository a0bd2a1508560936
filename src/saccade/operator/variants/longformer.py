"""Longformer: a window around each token, and a few global tokens with separate projections.

    ordinary rows   out_i = softmax(q_i.k_j / sqrt(d)) v_j       over j in the window of i, and over the global tokens
    global rows     out_i = softmax(qg_i.kg_j / sqrt(d)) vg_j    over all j, with qg, kg, vg = x Wqg, x Wkg, x Wvg

Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer" (2020), section 3.1: sliding and dilated windows,
symmetric global attention, and "linear projections for global attention", which begin as copies of the ordinary ones.
A global token that lies in the window of a row counts once there. With ordinary projections for all rows it is a mask:
`saccade.variants.patterns.longformer`.

Which tokens are global. Those at `global_tokens` of each item, counted among its real tokens (0 is the first, as a CLS
token is, on whichever side the item is padded); and those of a call, all that a `Global(...)` in its mask names: for
question answering `mask=longformer(window, global_tokens=is_question)`, booleans (B, L). What is seen is what both the
mask and the pattern show.

Time O(L (w + g) D) for a window w and g global tokens, and O(L E D) for their projections; memory O(L D), forward and
backward: the operator walks over the tiles that the pattern visits, d times as many where the window is dilated by d.

Shape legend: B batch, Hq / Hkv query and key-value heads (query head h reads h // (Hq // Hkv)), Lq / Lk lengths, D key
width, Dv value width, E model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .._attention import attention
from .._masks import Causal, Global, Mask, Padding, as_mask
from .._masks._algebra import And
from .._masks._data import whole
from ._mechanism import HeadSizes, Mechanism, MechanismConfig, Traits
from .patterns import longformer


@dataclass(frozen=True)
class LongformerConfig(MechanismConfig):
    """A window around each token, optionally dilated, and global tokens with separate projections.

    Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer" (2020), section 3.1.

    Args:
        window: w, keys in a window without the token's own, half of them on each side: even, at least 2.
        dilation: steps between the keys of a window, or one for each query head.
        global_tokens: positions of global tokens, from 0, counted among an item's real tokens.

    Raises:
        TypeError, ValueError: outside of these ranges.

    Example:
        >>> import torch, saccade
        >>> mechanism = saccade.variants.LongformerConfig(window=4)
        >>> config = saccade.nn.AttentionConfig(width=8, heads=2, mechanism=mechanism)
        >>> saccade.nn.MultiHeadAttention(config)(torch.ones(1, 12, 8)).shape
        torch.Size([1, 12, 8])
    """

    window: int
    dilation: int | tuple[int, ...] = 1
    global_tokens: tuple[int, ...] = (0,)

    name: ClassVar[str] = "longformer"
    reads_tokens: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        paper="Beltagy, Peters, Cohan, Longformer: The Long-Document Transformer, 2020",
        computes="softmax",
        time="O(L (w + g) d), w keys in a window, g global tokens",
        memory="O(L d)",
        choose="Long documents of which a few known tokens gather everything: classification, question answering.",
        avoid="Tokens that need any other at any distance, or a model that was trained with full attention.",
        cross="its global tokens project the tokens they read, and those of a context are not given",
        masks="who sees whom is its own pattern, in which a Global(...) names more global tokens",
        takes=("bias", "scale", "softcap", "sink", "dropout"),
    )

    def __post_init__(self) -> None:
        if isinstance(self.dilation, list):
            object.__setattr__(self, "dilation", tuple(self.dilation))
        longformer(self.window, dilation=self.dilation)
        if isinstance(self.global_tokens, str) or not isinstance(self.global_tokens, Sequence):
            raise TypeError(f"global_tokens: expected positions, a tuple of ints, got {self.global_tokens!r}")
        positions = tuple(whole(position, "global_tokens", least=0) for position in self.global_tokens)
        object.__setattr__(self, "global_tokens", positions)

    @classmethod
    def usual(cls, length: int) -> LongformerConfig:
        """A window of 512, and the first token global (sections 5 and 6)."""
        return cls(512)

    def build(self, heads: HeadSizes) -> LongformerAttention:
        """The module; ValueError for dilations of another number of heads."""
        return LongformerAttention(self, heads)


class LongformerAttention(Mechanism):
    """`LongformerConfig` as a module, with the parameters `global_query`, `global_key` and `global_value`.

    Inside `saccade.nn.MultiHeadAttention` these begin as copies of its own projections. They read the tokens: rotary
    positions and norms of queries and keys do not change the rows of global tokens.

    With a cache the first call must hold all global tokens: the cache lacks the keys that a later one would need.
    """

    def __init__(self, config: LongformerConfig, heads: HeadSizes):
        super().__init__()
        if isinstance(config.dilation, tuple) and len(config.dilation) != heads.heads:
            raise ValueError(f"dilation: {len(config.dilation)} of them, but there are {heads.heads} query heads")
        self.config, self.heads = config, heads
        self.window = longformer(config.window, dilation=config.dilation)
        self.global_query = nn.Linear(heads.width, heads.heads * heads.head)
        self.global_key = nn.Linear(heads.width, heads.kv_heads * heads.head)
        self.global_value = nn.Linear(heads.width, heads.kv_heads * heads.value_head)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the projections anew, normal with variance 1 / E."""
        for layer in (self.global_query, self.global_key, self.global_value):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    @torch.no_grad()
    def begin_from(self, projections: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        """Become copies of the ordinary (weight, bias) of queries, keys and values (section 3.1)."""
        own = (self.global_query, self.global_key, self.global_value)
        for layer, (weight, bias) in zip(own, projections, strict=True):
            layer.weight.copy_(weight)
            nn.init.zeros_(layer.bias) if bias is None else layer.bias.copy_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Read.

        Args:
            query: (B, Hq, Lq, D).
            key, value: (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv).
            mask: `Causal()`, `Padding(...)` and masks with a `Global(...)`, joined by `&`.
            tokens: (B, Lq, E), what the heads were projected from.
            **options: bias, scale, softcap, sink and dropout, as in `saccade.attention`.

        Raises:
            ValueError: another mask; tokens that do not fit; a global token after the first call of a cache.
        """
        tokens = self._checked(tokens, query)
        batch, Lq, Lk = query.shape[0], query.shape[2], key.shape[2]
        said = _CallMask.of(as_mask(mask), batch, Lq, Lk, query.device)
        chosen = self._chosen(said, Lk, query.device)
        if chosen is None:
            return attention(query, key, value, _both(said.mask, self.window), **options)
        rows = chosen[:, Lk - Lq :] if Lq <= Lk else chosen.new_zeros(1, Lq)
        pattern = _both(said.mask, self.window | Global(chosen))
        if not rows.any():
            return attention(query, key, value, pattern, **options)
        if Lq != Lk:
            raise ValueError(
                f"global_tokens: a global token is among the {Lq} new tokens, and needs projections of all {Lk}; pass "
                "all global tokens in the first call of a cache"
            )
        ordinary = attention(query, key, value, _both(pattern, _rows(~rows, Lk)), **options)
        read = self._projected(tokens if said.real is None else tokens.masked_fill(~said.real[..., None], 0.0), rows)
        return ordinary + attention(*read, _both(said.mask, _rows(rows, Lk)), **options)

    def _checked(self, tokens: Tensor | None, query: Tensor) -> Tensor:
        expected = (query.shape[0], query.shape[2], self.heads.width)
        if not isinstance(tokens, Tensor) or tokens.shape != expected:
            came = tuple(tokens.shape) if isinstance(tokens, Tensor) else tokens
            raise ValueError(f"tokens: expected the tokens from which the heads were projected, {expected}, got {came}")
        return tokens

    def _chosen(self, said: _CallMask, Lk: int, device: torch.device) -> Tensor | None:
        """The global tokens, bool (1 or B, Lk); None if it is certain that there are none."""
        wanted = torch.tensor([position for position in self.config.global_tokens if position < Lk], device=device)
        if not Lk or not (wanted.numel() or said.chosen):
            return None
        real = torch.ones(1, Lk, dtype=torch.bool, device=device) if said.real is None else said.real
        chosen = real & torch.isin(real.cumsum(1) - 1, wanted.long())
        item, index = torch.arange(said.batch, device=device)[:, None], torch.arange(Lk, device=device)[None]
        for part in said.chosen:
            chosen = chosen | (real & part.members.contains(item[: part.members.batch], index))
        return chosen if len(chosen) else None

    def _projected(self, tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Global projections: queries (B, Hq, L, D), 0 in rows that are not global; keys and values of all tokens."""
        where = rows.expand(tokens.shape[:2]).nonzero(as_tuple=True)
        some = self.global_query(tokens[where])
        query = some.new_zeros(*tokens.shape[:2], some.shape[-1]).index_put(where, some)
        heads, features = (self.heads.head, self.heads.head, self.heads.value_head), (query, self.global_key(tokens))
        whole_ones = zip((*features, self.global_value(tokens)), heads, strict=True)
        query, key, value = (one.unflatten(-1, (-1, width)).transpose(1, 2) for one, width in whole_ones)
        return query, key, value

    def extra_repr(self) -> str:
        return repr(self.config)


class _CallMask(NamedTuple):
    """The parts of a call's mask."""

    mask: Mask | None
    real: Tensor | None  # bool (1 or B, Lk), the tokens that are no padding; None: all
    chosen: tuple[Global, ...]  # the global tokens it names
    batch: int

    @classmethod
    def of(cls, mask: Mask | None, batch: int, Lq: int, Lk: int, device: torch.device) -> _CallMask:
        if mask is None:
            return cls(None, None, (), batch)
        if mask.placement() not in (None, "open"):
            raise ValueError(f"mask: longformer takes none that is placed by .at or .slice, got {mask!r}")
        mask.check(batch, None, Lq, Lk, device)
        real, chosen = None, []
        for factor in mask.parts if isinstance(mask, And) else (mask,):
            named = list(_global_parts(factor))
            if isinstance(factor, Padding):
                kept = factor.sides(Lq, Lk, device).keys
                real = kept[:, 0] if real is None or kept is None else real & kept[:, 0]
            elif not (named or isinstance(factor, Causal)):
                raise ValueError(
                    "mask: longformer takes Causal(), Padding(...) and masks with Global(...), since "
                    f"{LongformerConfig.traits.masks}; got {factor!r}"
                )
            chosen += named
        return cls(mask, real, tuple(chosen), batch)


def _global_parts(mask: Mask) -> Iterator[Global]:
    if isinstance(mask, Global):
        yield mask
    for part in mask._children():
        yield from _global_parts(part)


def _both(first: Mask | None, second: Mask) -> Mask:
    return second if first is None else first & second


def _rows(rows: Tensor, Lk: int) -> Mask:
    """A mask that shows all keys to the marked rows (1 or B, Lq), and nothing to all others."""
    return Padding([Lk] * rows.shape[0], queries=rows)
