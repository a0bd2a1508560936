"""Which pairs the layers of a model see, by its configuration and by the user's promises.

Shape legend: L length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..subject._families import text_config
from ..subject._transformers import kinds_of_layers
from ._stack import Stack
from ._state import attributes

_FEW = 7  # keys of the narrowest window
_WIDTHS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True)
class Pattern:
    """A pattern of pairs that a layer may have. `pairs(L)` is (L, L) bool: pairs with weight."""

    words: str
    argument: str  # of the configuration, or of `verify_stack`
    pairs: Callable[[int], Tensor]
    width: int | None = None  # of a window or chunk


@dataclass(frozen=True)
class LayerRules:
    """Patterns that each layer may have, by its number; those of `others` for layers without a number of their own.

    `needed`: patterns of which at least one head has one.
    """

    layers: Mapping[int, tuple[Pattern, ...]]
    others: tuple[Pattern, ...] = ()
    needed: tuple[Pattern, ...] = ()

    def of(self, layer: int) -> tuple[Pattern, ...]:
        return self.layers.get(layer, self.others)

    @property
    def widths(self) -> list[int]:
        patterns = [*self.others, *(pattern for patterns in self.layers.values() for pattern in patterns)]
        return sorted({pattern.width for pattern in patterns if pattern.width is not None})


@contextmanager
def narrowed(stack: Stack, widths: Iterable[int]) -> Iterator[tuple[Stack, dict[int, int]]]:
    """The stack with these windows and chunks of a few keys within, and the new widths by the old ones.

    Short documents leave them. For models of transformers, which read their widths from configurations and layers in
    each call.
    """
    few = {width: _FEW + at for at, width in enumerate(sorted(widths))}
    holders = {id(held): held for part in stack.modules for module in part.modules() for held in _holders(module)}
    changes = [
        (held, name, few[vars(held)[name]])
        for held in holders.values()
        for name in _WIDTHS
        if isinstance(vars(held).get(name), int) and vars(held)[name] in few
    ]
    window = stack.promises.window
    promises = replace(stack.promises, window=few.get(window, window) if window is not None else None)
    with attributes(changes):
        yield replace(stack, promises=promises), few


def _holders(module: Any) -> Iterator[Any]:
    """The objects that may hold the width of a window for this module."""
    config: Any = getattr(module, "config", None)
    yield module
    if hasattr(config, "get_text_config"):
        text = config.get_text_config()
        yield from (config, text)
        with suppress(AttributeError):  # parts of a model that have no layers
            yield from text.per_layer_config or ()


def rules_of(stack: Stack) -> LayerRules | None:
    """The rules of the stack's configuration or promises; None: nothing says what its layers see."""
    causal, config = stack.promises.causal, configuration(stack)
    if causal is None:
        return None
    if of_layers := kinds_of_layers(config):
        kinds = [kind for kind, _ in of_layers]
        layers = {at: _patterns(kind, own, kinds, causal) for at, (kind, own) in enumerate(of_layers)}
        return LayerRules({at: patterns for at, patterns in layers.items() if patterns})
    local = getattr(config, "attention_layers", None)
    if isinstance(local, (list, tuple)) and set(local) <= {"global", "local"}:  # GPT-Neo
        width = getattr(config, "window_size", None)
        windows = _windows(width, causal, "config.window_size") if isinstance(width, int) else ()
        return LayerRules({at: windows if kind == "local" else (_full(causal),) for at, kind in enumerate(local)})
    width, argument = _promised_window(stack, config)
    if width is None:
        return None
    windows = _windows(width, causal, argument)
    return LayerRules({}, (*windows, _full(causal)), windows)


def configuration(stack: Stack) -> Any:
    """The configuration of the part that reads text; None where the module has none."""
    return text_config(getattr(stack.module, "config", None))


def _promised_window(stack: Stack, config: Any) -> tuple[int | None, str]:
    if stack.promises.window is not None:
        return stack.promises.window, "window="
    width = getattr(config, "sliding_window", None)
    used = hasattr(config, "get_text_config") and getattr(config, "use_sliding_window", True)
    return (width, "config.sliding_window") if used and isinstance(width, int) and width > 0 else (None, "")


def _patterns(kind: str, config: Any, kinds: list[str], causal: bool) -> tuple[Pattern, ...]:
    """The patterns of a layer of this kind; none where its name does not say which pairs it sees."""
    width = getattr(config, "sliding_window", None)
    windows = _windows(width, causal, "config.sliding_window") if isinstance(width, int) and width > 0 else ()
    if kind == "full_attention":  # where no layer is called sliding, a window may be for all of them, as MiniMax's is
        return (_full(causal), *(() if "sliding_attention" in kinds else windows))
    if kind == "sliding_attention":
        return windows
    size = getattr(config, "attention_chunk_size", None)
    if kind == "chunked_attention" and isinstance(size, int) and size > 0:
        return (_chunked(size, causal),)
    return ()


def _full(causal: bool) -> Pattern:
    argument = "is_causal" if causal else "is_causal=False"
    return Pattern("every earlier token" if causal else "every token", argument, lambda length: _base(length, causal))


def _windows(width: int, causal: bool, argument: str) -> tuple[Pattern, ...]:
    """The window that counts `width` keys, the query's own included. In both directions some count the query's own
    key and some do not: `width - 1` or `width` keys on each side."""
    distances = (width - 1,) if causal else (width - 1, width)
    return tuple(_window(distance, width, causal, argument) for distance in distances)


def _window(distance: int, width: int, causal: bool, argument: str) -> Pattern:
    side = "" if causal else " to each side"

    def pairs(length: int) -> Tensor:
        return _base(length, causal) & (_apart(length).abs() <= distance)

    return Pattern(f"a window of {width} keys{side}", argument, pairs, width)


def _chunked(size: int, causal: bool) -> Pattern:
    def pairs(length: int) -> Tensor:
        chunk = torch.arange(length) // size
        return _base(length, causal) & (chunk[:, None] == chunk)

    return Pattern(f"chunks of {size} keys", "config.attention_chunk_size", pairs, size)


def _base(length: int, causal: bool) -> Tensor:
    return _apart(length) >= 0 if causal else torch.ones(length, length, dtype=torch.bool)


def _apart(length: int) -> Tensor:
    """(L, L): how far the key stands behind the query."""
    places = torch.arange(length)
    return places[:, None] - places


# Rotary positions


def rope_settings(config: Any) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """(type, parameters) of the rotary positions by the type of layer, "" for all layers."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping):
        return {}
    each = {"": rope} if not all(isinstance(own, Mapping) for own in rope.values()) or not rope else rope
    return {str(kind): (str(own.get("rope_type", own.get("type", "default"))), own) for kind, own in each.items()}


def rows_share_frequencies_until(stack: Stack) -> int | None:
    """The length from which on the longest row of a batch sets the frequencies of all, as dynamic scaling and LongRoPE
    do: rows are compared below it. None for other kinds."""
    config = configuration(stack)
    kinds = [rope for kind, rope in rope_settings(config).values() if kind in ("dynamic", "longrope")]
    lengths = (
        [
            holder.get(name)
            for holder in (*kinds, vars(config))
            for name in ("original_max_position_embeddings", "max_position_embeddings")
        ]
        if kinds
        else []
    )
    return next((length for length in lengths if isinstance(length, int)), None)
