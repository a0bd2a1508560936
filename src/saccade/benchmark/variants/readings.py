"""Compared mechanisms on given queries, keys and values: exact attention, sparse patterns, and `saccade.variants`.

Shape legend: B batch, Hq / Hkv query and key-value heads, L tokens, D key width, Dv value width, E = Hq D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...operator._attention import attention
from ...operator._masks import Causal, Mask
from ...operator.variants import HeadSizes, Mechanism, MechanismConfig, Recurrent, patterns
from ...support._restored import seeded
from .contenders import ContenderRunner, DecodingRun, VariantContender, counted
from .data import ProblemSizes
from .results import READING

Tensors = tuple[Tensor, Tensor, Tensor]
NO_STEP = "without a direction of time there is no next token"
ABOUT = 128  # keys in each row of patterns whose papers do not fix the number


@dataclass(frozen=True)
class ExactAttention(VariantContender):
    """Softmax attention over all keys, computed by `saccade.attention`."""

    name: str = "exact"
    kind = READING
    computes = "softmax"
    whole = True

    def setting(self, length: int) -> str:
        return ""

    def build(self, sizes: ProblemSizes, tensors: Tensors, seed: int) -> ContenderRunner:
        query, key, value = leaves = _leaves(tensors)

        def forward() -> Tensor:
            return attention(query, key, value, Causal() if sizes.causal else None)

        def decoding() -> DecodingRun:
            last, keys, values = query[:, :, -1:], key, value
            return DecodingRun(lambda: attention(last, keys, values), _bytes(keys, values))

        return ContenderRunner(forward, leaves, 3, decoding if sizes.causal else NO_STEP)


@dataclass(frozen=True)
class MaskedAttention(VariantContender):
    """Exact attention over the visible keys of a mask.

    causal, bidirectional: make the mask for a length and settings, or return why there is none. usual: default settings
    for a length. recent: the settings for the numbers of first and last keys that decoding keeps, if it needs no
    others.
    """

    causal: Callable[..., Mask] | str = ""
    bidirectional: Callable[..., Mask] | str = ""
    usual: Callable[[int], dict[str, Any]] = field(default=lambda length: {})
    given: tuple[tuple[str, Any], ...] = ()
    recent: tuple[str | None, str] | None = None
    kind = READING
    computes = "softmax"

    def settings(self, length: int) -> dict[str, Any]:
        return {**self.usual(length), **dict(self.given)}

    def setting(self, length: int) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings(length).items())

    def refusal(self, sizes: ProblemSizes) -> str:
        make = self.causal if sizes.causal else self.bidirectional
        return make if isinstance(make, str) else ""

    def mask(self, sizes: ProblemSizes) -> Mask:
        make = self.causal if sizes.causal else self.bidirectional
        assert callable(make)
        return make(**self.settings(sizes.length))

    def build(self, sizes: ProblemSizes, tensors: Tensors, seed: int) -> ContenderRunner:
        query, key, value = leaves = _leaves(tensors)

        def forward() -> Tensor:
            return attention(query, key, value, self.mask(sizes))

        def decoding() -> DecodingRun:
            last, (keys, values) = query[:, :, -1:], self._kept(sizes.length, key, value)
            if self.recent is not None:
                return DecodingRun(lambda: attention(last, keys, values), _bytes(keys, values))
            return DecodingRun(lambda: attention(last, keys, values, self.mask(sizes)), _bytes(keys, values))

        return ContenderRunner(forward, leaves, 3, decoding if sizes.causal else NO_STEP)

    def _kept(self, length: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values cached in decoding: only the first and last ones, if the mask never shows others."""
        if self.recent is None:
            return key, value
        first, last = (0 if name is None else self.settings(length)[name] for name in self.recent)
        if first + last >= length:
            return key, value
        return tuple(torch.cat([part[:, :, :first], part[:, :, length - last :]], 2) for part in (key, value))  # type: ignore[return-value]


FORWARDS = "the pattern is causal: it looks back only"

PATTERNS: tuple[MaskedAttention, ...] = (
    MaskedAttention("window", patterns.sliding_window, FORWARDS, lambda length: {"size": ABOUT}, recent=(None, "size")),
    MaskedAttention(
        "longformer-pattern",
        lambda window, globals: patterns.longformer(window, global_tokens=range(globals), causal=True),
        lambda window, globals: patterns.longformer(window, global_tokens=range(globals)),
        lambda length: {"window": 2 * ABOUT - 2, "globals": 1},
    ),
    MaskedAttention(
        "strided", patterns.sparse_strided, FORWARDS, lambda length: {"stride": max(1, math.isqrt(length))}
    ),
    MaskedAttention("fixed", patterns.sparse_fixed, FORWARDS, lambda length: {"stride": ABOUT, "columns": 8}),
    MaskedAttention(
        "bigbird",
        lambda block: patterns.bigbird(block, causal=True),
        lambda block: patterns.bigbird(block),
        lambda length: {"block": ABOUT // 8},
    ),
    MaskedAttention(
        "streaming",
        patterns.streaming,
        FORWARDS,
        lambda length: {"window": ABOUT - 4, "sinks": 4},
        recent=("sinks", "window"),
    ),
)


@dataclass(frozen=True)
class VariantAttention(VariantContender):
    """A mechanism of `saccade.variants` with initial parameters."""

    usual: Callable[[int], MechanismConfig] | None = None
    kind = READING

    def config(self, length: int) -> MechanismConfig:
        assert self.usual is not None
        return self.usual(length)

    @property
    def computes(self) -> str:
        """`Traits.computes`, but "other" if queries and keys are shared, so that the given keys are not used."""
        config = self.config(1024)
        return "other" if config.shares_key else config.traits.computes

    def setting(self, length: int) -> str:
        return described(self.config(length))

    def refusal(self, sizes: ProblemSizes) -> str:
        return refused(self.config(max(sizes.length, 1)), sizes)

    def build(self, sizes: ProblemSizes, tensors: Tensors, seed: int) -> ContenderRunner:
        config = self.config(sizes.length)
        query, key, value = leaves = _leaves(_paired(tensors, config.maps))
        if config.shares_key:
            key = query
        heads = HeadSizes(sizes.width, query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        module = built(config, heads, seed)

        def forward() -> Tensor:
            return module(query, key, value, Causal() if sizes.causal else None)

        decoding = _decoding(config, module, (query, key, value)) if sizes.causal else NO_STEP
        parameters = tuple(part for part in module.parameters() if part.requires_grad)
        inputs = (query, value) if config.shares_key else leaves
        return ContenderRunner(
            forward,
            (*inputs, *parameters),
            len(inputs),
            decoding,
            counted(module),
            lambda exact: _pairs(exact, config.maps),
        )


def refused(config: MechanismConfig, sizes: ProblemSizes) -> str:
    """Why a mechanism cannot use these q, k and v; "" if it can."""
    traits = config.traits
    able = traits.causal if sizes.causal else traits.bidirectional
    if able is not True:
        return f"cannot be {'causal' if sizes.causal else 'bidirectional'}: {able}"
    if sizes.heads != sizes.kv_heads and traits.grouped is not True:
        return f"needs as many key-value heads as query heads: {traits.grouped}"
    if sizes.heads % config.maps or sizes.kv_heads % config.maps:
        return f"takes heads in groups of {config.maps}, but there are {sizes.kv_heads}"
    return ""


def built(config: MechanismConfig, heads: HeadSizes, seed: int) -> Mechanism:
    """The module in evaluation mode, initialised from `seed`; the global generator is restored."""
    with seeded(seed):
        return config.build(heads).eval()


def described(config: MechanismConfig) -> str:
    """The fields of a configuration that differ from None and defaults, as `name=value`."""
    import dataclasses

    fields = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return ", ".join(f"{name}={_short(value)}" for name, value in fields if value is not None and value is not False)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)


def _leaves(tensors: Sequence[Tensor]) -> Tensors:
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in tensors)
    return query, key, value


def _paired(tensors: Tensors, maps: int) -> Tensors:
    """Concatenate the values of `maps` heads, for mechanisms with several query-key heads for each value head."""
    query, key, value = tensors
    return query, key, _pairs(value, maps)


def _pairs(tensor: Tensor, maps: int) -> Tensor:
    """(B, H, L, Dv) to (B, H / maps, L, maps Dv)."""
    if maps == 1:
        return tensor
    return tensor.unflatten(1, (-1, maps)).transpose(2, 3).flatten(3)


def _decoding(config: MechanismConfig, module: Mechanism, tensors: Tensors) -> Callable[[], DecodingRun] | str:
    if isinstance(module, Recurrent):
        return lambda: _recurrent(module, tensors)
    if config.traits.cached is not True:
        return str(config.traits.cached)
    query, key, value = tensors
    last = query[:, :, -1:]
    return lambda: DecodingRun(lambda: module(last, key, value, Causal()), _bytes(key, value))


@torch.no_grad()
def _recurrent(module: Recurrent, tensors: Tensors) -> DecodingRun:
    query, key, value = (part[:, :, :-1] for part in tensors)
    _, state = module.step(query, key, value)
    last, new_key, new_value = (part[:, :, -1:] for part in tensors)
    return DecodingRun(lambda: module.step(last, new_key, new_value, state)[0], _bytes(*state))


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
