"""Where attention calls can be seen: observers of this thread are told of each call, with what it was and gave.

The operator tells them of its own calls; `monitoring.calls` and `acceleration` of those that others compute. A call
made inside of another one (Saccade's operator below a replaced F.scaled_dot_product_attention, say) is the same call
and told once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ._call import ObservedCall

Observer = Callable[[ObservedCall], None]


class PassiveMode:
    """Mixed into a `TorchFunctionMode` that only looks: a call may be answered past it, if the observers are told."""


class _Thread(threading.local):
    observers: tuple[Observer, ...] = ()


THREAD = _Thread()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer` of every attention call of this thread meanwhile."""
    before = THREAD.observers
    THREAD.observers = (*before, observer)
    try:
        yield
    finally:
        THREAD.observers = before


def tell(observers: tuple[Observer, ...], call: ObservedCall) -> None:
    for observer in observers:
        observer(call)


@contextmanager
def aside() -> Iterator[tuple[Observer, ...]]:
    """Nobody is told of calls meanwhile: they belong to one that is told as a whole. Gives those to tell then."""
    before = THREAD.observers
    THREAD.observers = ()
    try:
        yield before
    finally:
        THREAD.observers = before
