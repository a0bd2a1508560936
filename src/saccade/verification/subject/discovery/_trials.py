"""Calls made to see whether a reading fits. They leave nothing behind: no warnings, no random state, no gradients."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ....support._restored import seeded, set_seed
from ...findings._finding import Inapplicable, TargetError
from .._calling import CallRequest, arguments_of, entered, invoke, picked
from .._inputs import NamedInputs
from .._reading import Reading
from .._subject import Subject


@dataclass(frozen=True)
class TrialSizes:
    """Sizes of a trial's inputs: unlike each other and the target's own, so that axes cannot be confused."""

    batch: int = 2
    length: int = 7
    key_length: int = 7

    @classmethod
    def unlike(cls, *taken: int | None) -> TrialSizes:
        free = [size for size in (7, 5, 11, 13, 17) if size not in taken]
        return cls(next(size for size in (2, 3, 5, 11) if size not in (*taken, free[0])), free[0], free[0])


@dataclass(eq=False)
class TargetTrials:
    """The target under trial, and what its failed trials raised."""

    target: Any
    errors: dict[str, TargetError] = field(default_factory=dict)  # what was tried, in words, and what came
    forced: TrialSizes | None = None  # for one that takes no other

    def inputs(self, reading: Reading, sizes: TrialSizes | None = None, seed: int = 0) -> NamedInputs:
        sizes = self.forced or sizes or sizes_for(reading)
        key_length = None if reading.form in ("self", "tokens") else sizes.key_length
        return Subject(self.target, reading).inputs(sizes.batch, sizes.length, key_length, seed=seed)

    def returned(self, reading: Reading, inputs: NamedInputs | None = None, tried: str = "") -> Any:
        """The result of a call; None if it raises."""
        inputs = inputs or self.inputs(reading)
        set_seed(0)  # so that dropout, if it is active, is the same in every trial
        try:
            if "B" not in reading.layout:
                inputs = inputs.items([0])
                if reading.form == "attention" and "H" not in reading.layout:
                    inputs = inputs.map(lambda tensor: tensor[:, :1])
            return invoke(self.target, reading, CallRequest(inputs))
        except Inapplicable:
            return None
        except TargetError as error:
            if tried:
                self.errors[tried] = error
            return None

    def out(self, reading: Reading, inputs: NamedInputs, **given: Any) -> Tensor | None:
        """The output in our layout, or None if the call raised."""
        set_seed(0)
        try:
            return Subject(self.target, reading)(inputs, **given).out
        except Inapplicable:
            return None
        except TargetError as error:
            if error.location is not None and error.error.startswith("NameError"):
                raise  # no other way of calling fixes it
            return None


def sizes_for(reading: Reading) -> TrialSizes:
    head = reading.width // reading.heads if reading.heads and reading.form != "attention" else None
    return TrialSizes.unlike(
        reading.width, reading.heads, reading.kv_heads, head, reading.value_width, reading.context_width
    )


@contextmanager
def unnoticed() -> Iterator[None]:
    """A block that restores warnings, the random state and the gradient mode."""
    state = random.getstate()
    with warnings.catch_warnings(), seeded(None), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(state)


def differs(tensor: Tensor, other: Tensor) -> Tensor:
    """The entries in which two outputs differ; NaN equals NaN."""
    return ~((tensor == other) | (tensor.isnan() & other.isnan()))


def tensors_in(returned: Any) -> Iterable[tuple[int | str | None, Tensor]]:
    """The tensors in a result with their places: None, a place in a tuple, a key or an attribute."""
    if isinstance(returned, Tensor):
        yield from [(None, returned)] if _holds_numbers(returned) else ()
    elif isinstance(returned, dict):
        yield from ((str(key), value) for key, value in returned.items() if _holds_numbers(value))
    elif isinstance(returned, (tuple, list)):
        yield from ((at, value) for at, value in enumerate(returned) if _holds_numbers(value))
    else:
        names: Any = getattr(returned, "__dict__", None) or getattr(type(returned), "__slots__", ())
        fields = ((key, getattr(returned, key, None)) for key in names if isinstance(key, str))
        yield from ((key, field) for key, field in fields if _holds_numbers(field))


def _holds_numbers(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that can be compared: not on meta, not sparse, not nested."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and not value.is_nested


def mixing_axes(trials: TargetTrials, reading: Reading) -> list[int]:
    """The axes of the output along which a change at one index of the last input (the values) moves other indices."""
    places, keywords = arguments_of(reading, CallRequest(trials.inputs(reading)))
    where: Any = reading.names[-1] if reading.names else len(places) - 1
    value: Tensor = keywords[where] if reading.names else places[where]
    before = _out(trials, reading, places, keywords)
    moving = []
    for axis in range(len(reading.layout) - 1):
        for at in (0, value.shape[axis] - 1):
            new = _changed(value, axis, at)
            if reading.names:
                after = _out(trials, reading, places, keywords | {where: new})
            else:
                after = _out(trials, reading, (*places[:where], new), keywords)
            if _elsewhere(before, after, axis, at):
                moving.append(axis)
                break
    return moving


def _changed(value: Tensor, axis: int, at: int) -> Tensor:
    new = value.clone()
    part = new.select(axis, at)
    part.copy_(2 * torch.randn(part.shape, generator=torch.Generator().manual_seed(5)))
    return new


def _elsewhere(before: Tensor | None, after: Tensor | None, axis: int, at: int) -> bool:
    if before is None or after is None or before.shape != after.shape or axis >= before.dim():
        return False
    changed = differs(before, after).movedim(axis, 0)
    return bool(changed[:at].any() or changed[at + 1 :].any())


def _out(trials: TargetTrials, reading: Reading, places: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor | None:
    try:
        out = picked(entered(trials.target, reading, places, keywords), reading.out)
    except (Inapplicable, TargetError):
        return None
    return out if isinstance(out, Tensor) else None
