"""Callbacks for the calls of modules, during a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], object]  # module, positional and keyword arguments
After = Callable[[nn.Module, Any], object]  # module, output


@contextmanager
def hooked(modules: Iterable[nn.Module], *, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """A block in which each call of the modules on this thread calls `before` and `after`.

    Another thread may run the same modules at the same time: its calls are left out. What the callbacks return is
    ignored.
    """
    thread = threading.get_ident()

    def enter(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if before is not None and threading.get_ident() == thread:
            before(module, given, named)

    def leave(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        if after is not None and threading.get_ident() == thread:
            after(module, out)

    with ExitStack() as hooks:
        for module in modules:
            if before is not None:
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            if after is not None:
                hooks.enter_context(module.register_forward_hook(leave))
        yield
