"""A target that is given a sequence in pieces, with its cache.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...support._restored import seeded
from ..findings._finding import Inapplicable, UnreadableResult
from ._calling import guarded, picked
from ._influence import is_causal
from ._inputs import NamedInputs
from ._subject import Subject


class CachedDecoder:
    """One target and its cache. Each call continues the last one until `reset`."""

    def __init__(self, subject: Subject) -> None:
        """
        Raises:
            Inapplicable: no cache of the target was found, or the target has no batch axis.
        """
        if subject.reading.cache is None:
            raise Inapplicable("no cache of the target was found")
        if "B" not in subject.reading.layout:
            raise Inapplicable("it takes no batch")
        self._subject, self._cache = subject, subject.reading.cache
        self._needs_mask = subject.form != "cross" and not is_causal(subject)
        self.state: Any = None
        self.position = 0
        self.reset()

    def reset(self) -> None:
        """Begin a new sequence, in the way that the target has for it."""
        self.position = 0
        if self._cache.kind != "inside":
            self.state = None if self._cache.make is None else guarded(self._cache.make)
        elif self._cache.reset is not None:
            guarded(getattr(self._subject.target, self._cache.reset))

    @property
    def can_reset(self) -> bool:
        """Whether the cache can be reset: an empty cache to pass, a method, or position 0 to name."""
        cache = self._cache
        return cache.kind != "inside" or cache.reset is not None or cache.position is not None

    def kept(self) -> list[Tensor]:
        """Every tensor in the state of the target. If a module keeps its state inside: all its tensors except
        parameters."""
        if self._cache.kind != "inside":
            return list(kept_tensors(self.state))
        if self._subject.module is None:
            return []
        modules = self._subject.module.modules()
        held = [value for module in modules for value in (*vars(module).values(), *module._buffers.values())]
        held = [value for value in held if isinstance(value, (Tensor, list, tuple))]
        return list(kept_tensors(held))

    def __call__(self, piece: NamedInputs) -> Tensor:
        """The outputs of the next positions. A target that is not causal by itself is given its mask for the first of
        them, if they are many."""
        if self._cache.step is not None and piece.length > 1:
            single = [piece.cut(slice(at, at + 1)) for at in range(piece.length)]
            return torch.cat([self(position) for position in single], -2)
        masked = self._needs_mask and self.position == 0 and piece.length > 1
        triangle = torch.ones(piece.length, piece.length, dtype=torch.bool).tril() if masked else None
        result = self.next_call(piece)(piece, pairs=triangle)
        if self._cache.kind == "passed":
            self.state = picked_state(result.returned, self._cache.returned)
        if result.out.shape[-2] != piece.length:
            given, wanted = result.out.shape[-2], piece.length
            raise UnreadableResult(f"{given} outputs came for a piece of {wanted} positions", None)
        self.position += piece.length
        return result.out

    def next_call(self, piece: NamedInputs) -> Subject:
        """The next call of the target, for `piece`, with the state of all earlier ones."""
        cache, reading = self._cache, self._subject.reading
        keywords = dict(reading.constants)
        call = reading.call
        if cache.position is not None:
            keywords[cache.position] = self.position
        if cache.positions is not None:
            name, axes = cache.positions
            keywords[name] = numbered(piece, axes, self.position)
        if cache.flag is not None:
            keywords[cache.flag] = True
        if isinstance(cache.argument, int):
            call = _with_place(call, cache.argument, self.state)
        elif cache.argument is not None:
            keywords[cache.argument] = self.state
        if cache.step is not None:
            call = _with_method(cache.step)
        # weights are not asked for: where they stand may differ, too
        out = reading.out if cache.out is None else cache.out
        reading_of_step = replace(reading, constants=keywords, call=call, out=out, weights=None)
        return replace(self._subject, reading=reading_of_step)


def numbered(piece: NamedInputs, axes: str, start: int = 0) -> Tensor:
    """The positions of a piece from `start` on, (B, L) or (L,)."""
    first = next(iter(piece.tensors.values()))
    numbers = torch.arange(start, start + piece.length, device=first.device)
    return numbers.expand(piece.batch, -1) if axes == "BL" else numbers


def _with_place(adapter: Callable[..., Any] | None, place: int, state: Any) -> Callable[..., Any]:
    def call(target: Any, *places: Any, **keywords: Any) -> Any:
        filled = [*places, *[None] * (place - len(places))]
        filled = [*filled[:place], state, *filled[place + 1 :]]
        return target(*filled, **keywords) if adapter is None else adapter(target, *filled, **keywords)

    return call


def _with_method(name: str) -> Callable[..., Any]:
    def call(target: Any, *places: Any, **keywords: Any) -> Any:
        return getattr(target, name)(*places, **keywords)

    return call


def picked_state(returned: Any, where: int | str | tuple[int, ...] | None) -> Any:
    """The state at `where` of a result.

    Raises:
        UnreadableResult: the result has no such place.
    """
    if where is None:
        raise UnreadableResult("the state that the target keeps is not in its return value", None)
    if isinstance(where, tuple):
        return tuple(picked_state(returned, place) for place in where)
    try:
        return picked(returned, where)
    except UnreadableResult as error:
        raise UnreadableResult(
            f"the state that the target keeps is not in its return value: {error.__cause__}", None
        ) from error


def in_pieces(decoder: CachedDecoder, inputs: NamedInputs, sizes: Sequence[int]) -> Tensor:
    """All outputs of a sequence given in pieces of these sizes."""
    with seeded(0, devices=None), torch.no_grad():
        return torch.cat([decoder(piece) for piece in pieces(inputs, sizes)], -2)


def pieces(inputs: NamedInputs, sizes: Sequence[int]) -> Iterator[NamedInputs]:
    """A sequence cut into pieces; a context is given whole each time."""
    start = 0
    for size in sizes:
        yield inputs.cut(slice(start, start + size), "query" if "context" in inputs.tensors else "both")
        start += size


def capacity(kept: Sequence[Tensor]) -> int:
    """The longest axis but the first and last of any tensor: how many positions a cache made beforehand may hold."""
    return max((max(tensor.shape[1:-1], default=0) for tensor in kept if tensor.dim() >= 3), default=0)


def kept_tensors(state: Any) -> Iterator[Tensor]:
    """Every tensor in a cache: in lists, tuples, dicts and attributes."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        yield from kept_tensors(list(state.values()))
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from kept_tensors(value)
    elif hasattr(state, "__dict__") and not inspect.isroutine(state):
        yield from kept_tensors([value for value in vars(state).values() if value is not state])
