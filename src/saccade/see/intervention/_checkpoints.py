"""Checkpointed forwards (`torch.utils.checkpoint`): the backward pass repeats them with their edits.

The repetition happens in the backward pass, maybe after the block; without the edits, gradients would be those of
another function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.utils import checkpoint as _torch

from ...support._threads import ThreadBlocks
from ..monitoring.calls._thread import suspended

Repeating = Callable[[], AbstractContextManager[None]]


class Repeated(Protocol):
    """State that is restored while a forward is repeated."""

    def now(self) -> Repeating:
        """A context manager that restores the state of this moment."""


@contextmanager
def repeated_with(what: Repeated) -> Iterator[None]:
    """Repeat regions that are checkpointed within this block, on this thread, with `what`."""
    with _REPEATED.holding(what):
        yield


def _put() -> Callable[[], None]:
    """Replace the two functions of `torch.utils.checkpoint` that receive the region."""
    before = {name: getattr(_torch, name) for name in (_GENERATOR, _FUNCTION)}
    generator, reentrant = before[_GENERATOR], before[_FUNCTION]

    class WithEdits:
        """Replaces CheckpointFunction."""

        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return reentrant.apply(_repeating(function, runs_now=True), *args)

    def put_back() -> None:
        for name, function in before.items():
            setattr(_torch, name, function)

    setattr(_torch, _FUNCTION, WithEdits)
    setattr(_torch, _GENERATOR, lambda function, *rest, **more: generator(_repeating(function), *rest, **more))
    return put_back


_GENERATOR = "_checkpoint_without_reentrant_generator"
_FUNCTION = "CheckpointFunction"
_REPEATED: ThreadBlocks[Repeated] = ThreadBlocks(_put)


def _repeating(function: Callable[..., Any], runs_now: bool = False) -> Callable[..., Any]:
    """`function`, which runs with the present state whenever it is called again."""
    inside = _REPEATED.thread.held.values
    if not inside or torch.compiler.is_compiling():
        return function
    states = [state.now() for state in inside]
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
