"""Replaces functions of torch.nn.functional while handlers are registered; each thread has its own handlers.

A function is put there by the first who wants it, on whatever thread, and taken away after the last. Whom it asks is a
matter of the thread: others' calls go straight on. PyTorch's compiler looks through it, and sees the switch of a
`threading.local` (it cannot look into a ContextVar).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...support._threads import Entered, ThreadBlocks
from ._calls import SdpaCall

Proceed = Callable[[], Any]
Handler = Callable[[SdpaCall, Callable[[], Tensor]], Tensor]
MhaHandler = Callable[[bool, Callable[[], tuple[Tensor, "Tensor | None"]]], tuple[Tensor, "Tensor | None"]]
AnyHandler = Callable[[Any, Proceed], Any]


def _without_fast_path() -> Callable[[], None]:
    """Disables PyTorch's native path through whole layers, which calls no replaceable function."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return functools.partial(torch.backends.mha.set_fastpath_enabled, before)


_FAST_PATH: ThreadBlocks[None] = ThreadBlocks(_without_fast_path)


class _Replacement:
    """One function of torch.nn.functional: its handlers, and the replacement installed while there are any.

    Args:
        name: of the function.
        read: its arguments as the handlers get them. TypeError: wrong arguments, for which the function itself must
            raise the error.
    """

    def __init__(self, name: str, read: Callable[..., Any]) -> None:
        self.name, self.read = name, read
        self.handlers: ThreadBlocks[AnyHandler] = ThreadBlocks(self._put)
        self.ours: Any = None

    @contextmanager
    def handled_by(self, handler: AnyHandler) -> Iterator[None]:
        with _FAST_PATH.holding(None), self.handlers.holding(handler):
            yield

    def _put(self) -> Callable[[], None]:
        standing = getattr(F, self.name)
        # The same function as last time where that is possible: compiled graphs know it by its identity.
        if self.ours is None or standing not in (self.ours, self.ours.__wrapped__):
            self.ours = self._replacing(standing)
        setattr(F, self.name, self.ours)
        return self._take_away

    def _take_away(self) -> None:
        if getattr(F, self.name) is self.ours:
            setattr(F, self.name, self.ours.__wrapped__)

    def _replacing(self, below: Callable[..., Any]) -> Callable[..., Any]:
        thread, read = self.handlers.thread, self.read

        @functools.wraps(below)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            handlers = thread.held.values
            if not handlers:
                return below(*args, **kwargs)
            try:
                call = read(*args, **kwargs)
            except TypeError:
                return below(*args, **kwargs)  # which says what is wrong
            return run_handlers(thread.held, handlers, call, functools.partial(below, *args, **kwargs))

        return replaced


def run_handlers(entered: Entered[AnyHandler], handlers: tuple[AnyHandler, ...], call: Any, bottom: Proceed) -> Any:
    """Call the last (innermost) handler. Its `proceed`, and the calls that it makes, go to the handlers outside of it;
    `proceed` of the outermost handler is `bottom`."""
    before, below = entered.values, handlers[:-1]
    entered.values = below
    try:
        return handlers[-1](call, functools.partial(run_handlers, entered, below, call, bottom) if below else bottom)
    finally:
        entered.values = before


_SDPA = _Replacement("scaled_dot_product_attention", SdpaCall.of)


@contextmanager
def sdpa_handled_by(handler: Handler) -> Iterator[None]:
    """A block in which `F.scaled_dot_product_attention(...)` on this thread calls `handler(call, proceed)`.

    `proceed()` computes the call the next way down: by the handler of the enclosing block, in the end by PyTorch, with
    the very arguments that were given, so that modes and subclasses of tensors see what they would have seen. A call
    that the handler makes itself goes to the enclosing blocks' handlers, too, and never to itself.

    Meanwhile the native fast path of `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` is off in the whole
    process: it calls no function. Function and fast path are put back as they were after the last block of all threads,
    also after an exception. Where someone else has replaced F.scaled_dot_product_attention meanwhile, theirs stays, and
    with it whatever it calls: if that is ours, it passes every call on.

    Args:
        handler: answers a call. For torch.compile give the same function each time: a new one is compiled anew.
    """
    with _SDPA.handled_by(handler):
        yield


@contextmanager
def mha_handled_by(handler: MhaHandler) -> Iterator[None]:
    """As `sdpa_handled_by`, for `F.multi_head_attention_forward`; the handler receives `need_weights`.

    With it PyTorch forms the weights itself and calls no F.scaled_dot_product_attention; the result is (out, weights).
    """
    with _MHA.handled_by(handler):
        yield


_NEED_WEIGHTS = 15  # place among the arguments of F.multi_head_attention_forward


def _need_weights(*args: Any, **kwargs: Any) -> bool:
    return bool(args[_NEED_WEIGHTS] if len(args) > _NEED_WEIGHTS else kwargs.get("need_weights", True))


_MHA = _Replacement("multi_head_attention_forward", _need_weights)
