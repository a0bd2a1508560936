"""Who watches on this thread, and the one mode that sees calls for all of them.

Observers hang on `_tap` and the mode stands on PyTorch's stack only while a watched forward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ....operator import _tap
from ....operator._call import AttentionCall, ObservedCall
from ....support._threads import PerThread


class CallWatcher(Protocol):
    edits_calls: bool  # whether `edits` may ever give any

    def observe(self, call: ObservedCall) -> None: ...

    def edits(self, source: str) -> tuple[Any, ...]:
        """The edits to the current call, as `editing` takes it; nothing: ()."""

    def missing(self, what: str, reason: str) -> Callable[[], None]: ...

    def not_shown(self, source: str, reason: str) -> None:
        """A call that happened and cannot be reported. Used only for observers that edit nothing."""

    @property
    def module(self) -> nn.Module | None: ...


class Watching:
    """Watchers of one thread, and the mode that sees calls for them."""

    watchers: tuple[CallWatcher, ...] = ()
    mode: Any = None
    editing: Callable[[tuple[Any, ...]], _tap.CallEdits] | None = None  # joins the edits of all watchers


THREAD = PerThread(Watching)


def tell(call: ObservedCall) -> None:
    """The observer of `_tap`: one function for all watches, so that compiled code meets the same one each time."""
    if torch.compiler.is_compiling():
        return
    with torch.no_grad(), torch._C.DisableTorchFunction(), counted_if_it_fails(call.source):
        call = call if THREAD.held.mode is None else THREAD.held.mode.completed(call)
    for watcher in THREAD.held.watchers:
        watcher.observe(call)


def _edits(source: str) -> _tap.CallEdits | None:
    """The editor of `_tap`: what everybody wants changed about a call, the outermost block's first."""
    found = tuple(edit for watcher in THREAD.held.watchers if watcher.edits_calls for edit in watcher.edits(source))
    return THREAD.held.editing(found) if found and THREAD.held.editing is not None else None


def missing(what: str, reason: str) -> Callable[[], None]:
    """What counts, when it is called, something as not seen at the place where the model is now."""
    counts = [watcher.missing(what, reason) for watcher in THREAD.held.watchers]

    def count() -> None:
        for one in counts:
            one()

    return count


def missed(what: str, reason: str) -> None:
    """Count it at once."""
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
    """The number of heads that the innermost module names, where it does."""
    module = THREAD.held.watchers[0].module if THREAD.held.watchers else None
    found = (getattr(module, name, None) for name in _HEADS)
    return next((heads for heads in found if isinstance(heads, int) and heads > 0), None)


def not_shown(source: str, reason: str) -> None:
    """Count a call as not seen by those who only look: it was changed, and no one call says how."""
    for watcher in THREAD.held.watchers:
        if not watcher.edits_calls:
            watcher.not_shown(source, reason)


def with_rows(call: AttentionCall, source: str) -> AttentionCall:
    """A call that somebody answers in PyTorch's place, with the rows that are tokens where that is known."""
    if THREAD.held.mode is None or call.real is not None:
        return call
    found: AttentionCall = THREAD.held.mode.with_rows(call, source)
    return found


def edited_by(editing: Callable[[tuple[Any, ...]], _tap.CallEdits]) -> None:
    """Who makes one answer of the edits of a call; the same for all of this thread."""
    THREAD.held.editing = editing


def begin(watcher: CallWatcher, make_mode: Callable[[], TorchFunctionMode]) -> None:
    """Tell `watcher` of this thread's calls from here on; the first one of the thread needs a mode."""
    if not THREAD.held.watchers:
        THREAD.held.mode = make_mode()
        _push_mode(THREAD.held.mode)
        _tap.THREAD.observers = (*_tap.THREAD.observers, tell)
    THREAD.held.watchers = (*THREAD.held.watchers, watcher)
    _tap.THREAD.editor = _edits if any(other.edits_calls for other in THREAD.held.watchers) else None


def end(watcher: CallWatcher) -> None:
    """No more. Ends may come in another order than beginnings."""
    THREAD.held.watchers = tuple(other for other in THREAD.held.watchers if other is not watcher)
    if not any(other.edits_calls for other in THREAD.held.watchers):
        _tap.THREAD.editor = None
    if not THREAD.held.watchers and THREAD.held.mode is not None:
        _tap.THREAD.observers = tuple(observer for observer in _tap.THREAD.observers if observer is not tell)
        mode, THREAD.held.mode = THREAD.held.mode, None
        mode.ended()
        _remove(mode)


@contextmanager
def suspended() -> Iterator[None]:
    """As if nobody watched: for compiled code, which would be compiled anew for each watch, or not at all."""
    watchers, make_mode = THREAD.held.watchers, type(THREAD.held.mode)
    for watcher in watchers:
        end(watcher)
    try:
        yield
    finally:
        for watcher in watchers:
            begin(watcher, make_mode)


def _remove(mode: TorchFunctionMode) -> None:
    """Take a mode off PyTorch's stack, wherever it stands there: an interrupted block may have left others above."""
    if not any(other is mode for other in _get_current_function_mode_stack()):
        return
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
