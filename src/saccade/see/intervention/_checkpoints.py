"""Checkpointed forwards (`torch.utils.checkpoint`): a backward pass repeats them with the edits that they had.

The repetition happens when gradients are wanted, maybe after the block; without the edits, its gradients would be those
of another function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as _torch

from ..monitoring.calls._thread import suspended

Repeating = Callable[[], AbstractContextManager[None]]


class Repeated(Protocol):
    """What is in force while a forward runs, and again while it is repeated."""

    def now(self) -> Repeating:
        """What brings back the place where the model is now."""


class _Blocks:
    """The blocks of a thread. Who ends one on another thread still reaches them."""

    inside: tuple[Repeated, ...] = ()  # the outermost first


class _Thread(threading.local):
    def __init__(self) -> None:
        self.blocks = _Blocks()


_THREAD = _Thread()
_LOCK = threading.Lock()
_USERS = 0
_GENERATOR = "_checkpoint_without_reentrant_generator"
_FUNCTION = "CheckpointFunction"
_BEFORE: dict[str, Any] = {}


@contextmanager
def repeated_with(what: Repeated) -> Iterator[None]:
    """Regions that are checkpointed within it, on this thread, are repeated with `what`."""
    _install()
    blocks = _THREAD.blocks
    blocks.inside = (*blocks.inside, what)
    try:
        yield
    finally:
        blocks.inside = tuple(one for one in blocks.inside if one is not what)
        _uninstall()


def _install() -> None:
    global _USERS
    with _LOCK:
        if _USERS == 0:
            _BEFORE.update({name: getattr(_torch, name) for name in (_GENERATOR, _FUNCTION)})
            generator, reentrant = _BEFORE[_GENERATOR], _BEFORE[_FUNCTION]

            class WithEdits:
                """Used instead of CheckpointFunction."""

                @staticmethod
                def apply(function: Callable[..., Any], *args: Any) -> Any:
                    return reentrant.apply(_repeating(function, runs_now=True), *args)

            setattr(_torch, _FUNCTION, WithEdits)
            setattr(_torch, _GENERATOR, lambda function, *rest, **more: generator(_repeating(function), *rest, **more))
        _USERS += 1


def _uninstall() -> None:
    global _USERS
    with _LOCK:
        _USERS -= 1
        if _USERS == 0:
            for name, function in _BEFORE.items():
                setattr(_torch, name, function)
            _BEFORE.clear()


def _repeating(function: Callable[..., Any], runs_now: bool = False) -> Callable[..., Any]:
    """`function`, which whenever it is called again runs with what is in force now."""
    inside = _THREAD.blocks.inside
    if not inside or torch.compiler.is_compiling():
        return function
    states = [one.now() for one in inside]
    first = runs_now

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if first:
            first = False
            return function(*args, **kwargs)
        with ExitStack() as stack:
            stack.enter_context(suspended())
            for state in states:
                stack.enter_context(state())
            return function(*args, **kwargs)

    return run
