"""A function of PyTorch whose code is exchanged: every reference to it runs the new one, wherever it was taken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Generic, TypeVar

from ...support._threads import ThreadBlocks

T = TypeVar("T")


class ExchangedCode(Generic[T]):
    """A function that runs other code while any thread is in a block.

    That code runs among the globals of PyTorch's module, where it finds this object as `name`.

    Attributes:
        blocks: the values of the blocks that a thread is in.
        below: PyTorch's function, with its own code and defaults.
    """

    def __init__(self, name: str, find: Callable[[], Any], replacement: Callable[..., Any]) -> None:
        self.blocks: ThreadBlocks[T] = ThreadBlocks(self._put)
        self.below: Callable[..., Any] = _not_found
        self._name, self._find, self._replacement = name, find, replacement.__code__
        self._code: CodeType | None = None

    def _put(self) -> Callable[[], None]:
        function = inspect.unwrap(self._find())  # without the wrappers of other code
        if not isinstance(function, FunctionType) or function.__code__.co_freevars or function.__code__ is self._code:
            return lambda: None
        before, space = function.__code__, function.__globals__
        self.below = FunctionType(before, space, function.__name__, function.__defaults__)
        self.below.__kwdefaults__ = function.__kwdefaults__
        self._code = self._code or self._replacement.replace(co_name=function.__name__)
        space[self._name], function.__code__ = self, self._code

        def put_back() -> None:
            if function.__code__ is self._code:
                function.__code__ = before

        return put_back


def _not_found(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("PyTorch's function was called before it was found")
