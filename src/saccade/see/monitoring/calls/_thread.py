"""The watchers of each thread, and the one mode that observes calls for all of them.

Observers are registered in `_observers`, and the mode on PyTorch's stack, only while a watched forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ....operator import _observers
from ....operator._call import AttentionCall, ObservedCall
from ....support._threads import PerThread


class CallWatcher(Protocol):
    edits_calls: bool  # whether `edits` may ever return any

    def observe(self, call: ObservedCall) -> None: ...

    def edits(self, source: str) -> tuple[Any, ...]:
        """The edits of the current call, as `editing` takes them; () for none."""

    def missing(self, what: str, reason: str) -> Callable[[], None]: ...

    def not_shown(self, source: str, reason: str) -> None:
        """A call that cannot be reported. Only for observers without edits."""

    @property
    def module(self) -> nn.Module | None: ...


class Watching:
    """Watchers of one thread, and the mode that sees calls for them."""

    watchers: tuple[CallWatcher, ...] = ()
    mode: Any = None
    editing: Callable[[tuple[Any, ...]], _observers.CallEdits] | None = None  # joins the edits of all watchers


THREAD = PerThread(Watching)


def tell(call: ObservedCall) -> None:
    """Pass a call to all watchers. It is one function, so that compiled code always calls the same observer."""
    if torch.compiler.is_compiling():
        return
    mode = THREAD.held.mode
    if mode is not None and mode.completes(call):
        with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails(call.source):
            call = mode.completed(call)
    for watcher in THREAD.held.watchers:
        watcher.observe(call)


def _edits(source: str) -> _observers.CallEdits | None:
    """The editor of `_observers`: joins all edits of a call, the outermost block's first."""
    edits = tuple(edit for watcher in THREAD.held.watchers if watcher.edits_calls for edit in watcher.edits(source))
    return THREAD.held.editing(edits) if edits and THREAD.held.editing is not None else None


def missing(what: str, reason: str) -> Callable[[], None]:
    """A function that counts something as unobserved, at the model's present place."""
    counts = [watcher.missing(what, reason) for watcher in THREAD.held.watchers]

    def count() -> None:
        for count_one in counts:
            count_one()

    return count


def missed(what: str, reason: str) -> None:
    """Count an unobserved call at once, with the reason."""
    missing(what, reason)()


@contextmanager
def counted_if_it_fails(what: str) -> Iterator[None]:
    """Errors in the observation must not reach the model: the call is counted as unobserved, with the reason."""
    try:
        yield
    except Exception as error:
        missed(what, f"{type(error).__name__}: {error}")


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


def heads_of_module() -> int | None:
    """The number of heads of the innermost module, by its attributes; None if unknown."""
    module = THREAD.held.watchers[0].module if THREAD.held.watchers else None
    numbers = (getattr(module, name, None) for name in _HEADS)
    return next((heads for heads in numbers if isinstance(heads, int) and heads > 0), None)


def not_shown(source: str, reason: str) -> None:
    """Count a call as unobserved for watchers without edits: after edits no single call describes it."""
    for watcher in THREAD.held.watchers:
        if not watcher.edits_calls:
            watcher.not_shown(source, reason)


def with_rows(call: AttentionCall, source: str) -> AttentionCall:
    """A call that is computed in PyTorch's place, with the rows that are tokens if these are known."""
    if THREAD.held.mode is None or call.real is not None:
        return call
    with_rows_: AttentionCall = THREAD.held.mode.with_rows(call, source)
    return with_rows_


def edited_by(editing: Callable[[tuple[Any, ...]], _observers.CallEdits]) -> None:
    """Set the function that joins the edits of a call, one for the whole thread."""
    THREAD.held.editing = editing


def begin(watcher: CallWatcher, make_mode: Callable[[], TorchFunctionMode]) -> None:
    """Report this thread's calls to `watcher` from here on; the first watcher of a thread needs a mode."""
    if not THREAD.held.watchers:
        THREAD.held.mode = make_mode()
        _push_mode(THREAD.held.mode)
        _observers.THREAD.observers = (*_observers.THREAD.observers, tell)
    THREAD.held.watchers = (*THREAD.held.watchers, watcher)
    _observers.THREAD.editor = _edits if any(other.edits_calls for other in THREAD.held.watchers) else None


def end(watcher: CallWatcher) -> None:
    """Stop reporting to `watcher`. Watchers may end in another order than they began."""
    THREAD.held.watchers = tuple(other for other in THREAD.held.watchers if other is not watcher)
    if not any(other.edits_calls for other in THREAD.held.watchers):
        _observers.THREAD.editor = None
    if not THREAD.held.watchers and THREAD.held.mode is not None:
        _observers.THREAD.observers = tuple(
            observer for observer in _observers.THREAD.observers if observer is not tell
        )
        mode, THREAD.held.mode = THREAD.held.mode, None
        mode.ended()
        _remove(mode)


@contextmanager
def suspended() -> Iterator[None]:
    """A block without watchers, for compiled code, which would be compiled again for each watch, or not at all."""
    watchers, make_mode = THREAD.held.watchers, type(THREAD.held.mode)
    for watcher in watchers:
        end(watcher)
    try:
        yield
    finally:
        for watcher in watchers:
            begin(watcher, make_mode)


def _remove(mode: TorchFunctionMode) -> None:
    """Take a mode off PyTorch's stack, wherever it is: an interrupted block may have left others above."""
    if not any(other is mode for other in _get_current_function_mode_stack()):
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
