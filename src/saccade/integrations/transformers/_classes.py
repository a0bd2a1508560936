"""Models that choose a class for their attention by the name of the implementation: GPT-J, Falcon, SAM and others.

They look it up in a dict of their module, where "saccade" would be a bare KeyError. While Saccade is registered it
stands there as something that says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NoReturn

Classes = dict[str, Any]


def refuse_by_name(model: Any, name: str) -> None:
    """Make the class of this model raise an error if `name` is requested and would select an attention class."""
    original = model.get_correct_attn_implementation
    if hasattr(original, "_without_saccade"):
        return

    @wraps(original)
    def check(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == name:
            for classes in _choices(type(self)):
                classes.setdefault(name, _refusing(type(self).__name__, name, classes))
        return original(self, requested_attention, *args, **kwargs)

    check._without_saccade = original  # type: ignore[attr-defined]
    model.get_correct_attn_implementation = check


def as_before(model: Any, name: str) -> None:
    """Undo `refuse_by_name`."""
    original = getattr(model.get_correct_attn_implementation, "_without_saccade", None)
    if original is None:
        return
    model.get_correct_attn_implementation = original
    for module in [one for key, one in sys.modules.items() if key.startswith("transformers.models.")]:
        for classes in _dicts(module):
            if hasattr(classes.get(name), "_refuses"):
                del classes[name]


def _choices(model: type) -> Iterator[Classes]:
    for kind in model.__mro__:
        yield from _dicts(sys.modules.get(kind.__module__))


def _dicts(module: Any) -> Iterator[Classes]:
    for key, held in list(getattr(module, "__dict__", {}).items()):
        if key.endswith("_ATTENTION_CLASSES") and isinstance(held, dict):
            yield held


def _refusing(model: str, name: str, classes: Classes) -> Callable[..., NoReturn]:
    known = ", ".join(repr(key) for key in classes)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{model} computes attention in its own classes and does not use the attention registry, "
            f"so attn_implementation={name!r} cannot reach it; it has {known}"
        )

    refuse._refuses = True  # type: ignore[attr-defined]
    return refuse
