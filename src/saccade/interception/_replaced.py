"""One function in the place of torch.nn.functional.scaled_dot_product_attention, and a switch for each thread.

The function is put there by the first who wants to handle calls, on whatever thread, and taken away after the last.
Whom it asks is a matter of the thread: others' calls go straight on. PyTorch's compiler looks through it, and sees the
switch of a `threading.local` (it cannot look into a ContextVar).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._calls import SdpaCall

Proceed = Callable[[], Tensor]
Handler = Callable[[SdpaCall, Proceed], Tensor]


class _Held:
    """The handlers of one thread, the innermost last. Others may take theirs away from another thread."""

    handlers: tuple[Handler, ...] = ()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = _Held()


_THREAD = _Thread()
_LOCK = threading.RLock()


def handlers() -> tuple[Handler, ...]:
    """Who handles the calls of this thread, the innermost last."""
    return _THREAD.held.handlers


@contextmanager
def sdpa_handled_by(handler: Handler) -> Iterator[None]:
    """Within it, on this thread, `F.scaled_dot_product_attention(...)` is `handler(call, proceed)`.

    `proceed()` computes the call the next way down: by the handler of the enclosing block, in the end by PyTorch, with
    the very arguments that were given, so that modes and subclasses of tensors see what they would have seen. A call
    that the handler makes itself goes to the enclosing block, too, and never to the handler again.

    Meanwhile the native fast path of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` is off in the whole
    process: it calls no function. Both are put back after the last block, on whatever thread, also after an exception.
    Where someone else has replaced F.scaled_dot_product_attention meanwhile, theirs stays, and so does ours below it,
    which then passes every call on.
    """
    held = _THREAD.held
    _SDPA.wanted()
    held.handlers = (*held.handlers, handler)
    try:
        yield
    finally:
        # Blocks of generators may end in any order: this one's handler goes, the others stay.
        held.handlers = _without_last(held.handlers, handler)
        _SDPA.done_with()


def _without_last(handlers: tuple[Handler, ...], handler: Handler) -> tuple[Handler, ...]:
    at = len(handlers) - 1 - handlers[::-1].index(handler)
    return handlers[:at] + handlers[at + 1 :]


def _handled(handlers: tuple[Handler, ...], call: SdpaCall, bottom: Proceed) -> Tensor:
    """The last of the handlers answers; meanwhile calls of this thread are those below's."""
    held, before = _THREAD.held, _THREAD.held.handlers
    below = handlers[:-1]
    held.handlers = below
    try:
        return handlers[-1](call, functools.partial(_handled, below, call, bottom) if below else bottom)
    finally:
        held.handlers = before


def _replacing(below: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function that stands where `below` stood. Its signature is whatever `below` takes: wrong calls go there."""

    @functools.wraps(below)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        handlers = _THREAD.held.handlers
        if not handlers:
            return below(*args, **kwargs)
        try:
            call = SdpaCall.of(*args, **kwargs)
        except TypeError:
            return below(*args, **kwargs)  # which says what is wrong
        return _handled(handlers, call, functools.partial(below, *args, **kwargs))

    return scaled_dot_product_attention


class _Installation:
    """Counts who wants the replaced function; puts it there for the first and takes it away after the last."""

    def __init__(self) -> None:
        self.users = 0
        self.ours: Callable[..., Tensor] | None = None
        self.fast_path = True

    def wanted(self) -> None:
        with _LOCK:
            if self.users == 0:
                self._install()
            self.users += 1

    def done_with(self) -> None:
        with _LOCK:
            self.users -= 1
            if self.users == 0:
                self._remove()

    def _install(self) -> None:
        standing = F.scaled_dot_product_attention
        # The same function as last time, where it can be: compiled graphs know it by its identity.
        if self.ours is None or (standing is not self.ours and self.ours.__wrapped__ is not standing):  # type: ignore[attr-defined]
            self.ours = _replacing(standing)
        F.scaled_dot_product_attention = self.ours
        self.fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def _remove(self) -> None:
        torch.backends.mha.set_fastpath_enabled(self.fast_path)
        assert self.ours is not None
        if F.scaled_dot_product_attention is self.ours:
            F.scaled_dot_product_attention = self.ours.__wrapped__  # type: ignore[attr-defined]


_SDPA = _Installation()
