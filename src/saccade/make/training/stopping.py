"""Ends a run at the end of a step after Ctrl-C (SIGINT) or SIGTERM, which clusters send."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Stopped(KeyboardInterrupt):
    """Training was stopped between two steps.

    Attributes:
        signal: the number of the signal, such as `signal.SIGINT`.

    Example:
        >>> import signal, saccade
        >>> error = saccade.training.Stopped(signal.SIGTERM)
        >>> isinstance(error, KeyboardInterrupt), str(error)
        (True, 'SIGTERM')
    """

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.signal = number


class StopAtSignal:
    """A context manager that records the first SIGINT or SIGTERM; a second one interrupts at once, as usual.

    Outside of the main thread, where Python delivers no signals, it has no effect.
    """

    _watched = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopAtSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self._watched}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number
