"""Values of each thread, and blocks (`with`) in which a thread replaces something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """`held`: one value for each thread, made by `make()`. PyTorch's compiler sees it, as it does not a ContextVar."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.held = make()


class Entered(Generic[T]):
    """The values of one thread's blocks, innermost last. A block that ends on another thread still removes its own
    value."""

    values: tuple[T, ...] = ()


def _nothing() -> Callable[[], None]:
    return lambda: None


class ThreadBlocks(Generic[T]):
    """Blocks that each hold a value, on any thread. While one is open, a replacement may be in place.

    Args:
        put: called at the beginning of the first block of all threads. What it gives is called after the last one, also
            after an exception.
    """

    def __init__(self, put: Callable[[], Callable[[], None]] = _nothing) -> None:
        self.thread: PerThread[Entered[T]] = PerThread(Entered)
        self._put = put
        self._put_back: Callable[[], None] | None = None
        self._users = 0
        self._lock = threading.RLock()

    @contextmanager
    def holding(self, value: T) -> Iterator[None]:
        """A block of this thread."""
        entered = self.thread.held
        with self._lock:
            if self._users == 0:
                self._put_back = self._put()
            self._users += 1
        entered.values = (*entered.values, value)
        try:
            yield
        finally:
            # The blocks of generators end in any order: this value goes, the others stay.
            at = len(entered.values) - 1 - entered.values[::-1].index(value)
            entered.values = entered.values[:at] + entered.values[at + 1 :]
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._put_back is not None:
                    self._put_back()
