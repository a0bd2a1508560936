"""Functions that torch.utils.checkpoint calls again in the backward pass, when the block around the forward has ended.

As in `_flex.py` the code of PyTorch's function is exchanged: models import it by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from ...support._threads import ThreadBlocks

Function = Callable[..., Any]
_GLOBAL = "_saccade_checkpoint"


def _exchanged(function: Any, *args: Any, **options: Any) -> Any:  # it runs among the globals of PyTorch's module
    return _saccade_checkpoint.call(function, *args, **options)  # type: ignore[name-defined]  # noqa: F821


class _ExchangedCode:
    """PyTorch's function while there are wrappers: its code is `_exchanged`."""

    def __init__(self) -> None:
        self.wrappers: ThreadBlocks[Callable[[Function], Function]] = ThreadBlocks(self._put)
        self.code: CodeType = _exchanged.__code__.replace(co_name="checkpoint")
        self.below: Function = _exchanged

    def _put(self) -> Callable[[], None]:
        from torch.utils import checkpoint as module

        function = inspect.unwrap(module.checkpoint)
        assert isinstance(function, FunctionType) and not function.__code__.co_freevars
        before, space = function.__code__, function.__globals__
        self.below = FunctionType(before, space, function.__name__, function.__defaults__)
        self.below.__kwdefaults__ = function.__kwdefaults__
        space[_GLOBAL] = self
        function.__code__ = self.code

        def put_back() -> None:
            if function.__code__ is self.code:
                function.__code__ = before

        return put_back

    def call(self, function: Function, *args: Any, **options: Any) -> Any:
        for wrap in self.wrappers.thread.held.values:
            function = wrap(function)
        return self.below(function, *args, **options)


_CHECKPOINT = _ExchangedCode()


@contextmanager
def checkpoints_wrapped_by(wrap: Callable[[Function], Function]) -> Iterator[None]:
    """A block in which this thread's `torch.utils.checkpoint.checkpoint(function, ...)` gets `wrap(function)`.

    What `wrap` returned is also called in the backward pass, when the block may have ended, and perhaps on another
    thread.
    """
    with _CHECKPOINT.wrappers.holding(wrap):
        yield
