"""Observers and editors of attention calls, for each thread.

Observers receive each call, with its arguments and results. The operator notifies them of its own calls;
`monitoring.calls` and `acceleration` of those that others compute. A call made inside of another one (Saccade's
operator below a replaced F.scaled_dot_product_attention, say) is the same call and told once.

Who computes a call asks `edits_of` first, and lets the edits answer it; observers receive the call as it was
computed.

`distributed` takes whole calls: while its model runs, `saccade.attention` has only some rows of a sequence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..support._threads import ThreadBlocks
from ._call import AttentionCall, ObservedCall

Observer = Callable[[ObservedCall], None]


class EditedOutput(NamedTuple):
    """The result of an edited call."""

    out: Tensor  # (B, Hq, Lq, Dv)
    call: AttentionCall | None  # the one call that gives it; None where it takes several to say it
    weights: Callable[[], Tensor] | None = None  # makes (B, Hq, Lq, Lk); None: who computes the call has them


class CallEdits(Protocol):
    """Changes to be made to the current call.

    Attention written by hand computes its weights before its values are known: `weights` changes the weights first,
    `output` the result later.
    """

    def answered(self, call: AttentionCall, compute: Callable[[AttentionCall], Tensor]) -> EditedOutput:
        """The result of the changed call. `compute(call)` is the original computation; it returns (B, Hq, Lq, Dv)."""

    def weights(self, call: AttentionCall, dense: DenseWeights) -> Tensor:
        """The changed weights (B, Hq, Lq, Lk) of a call written by hand. Only query and key of the call are known."""

    def output(self, call: AttentionCall, out: Tensor, with_value: Callable[[Tensor], Tensor]) -> EditedOutput:
        """The changed output (B, Hq, Lq, Dv) of a call written by hand. `with_value` computes the output for another
        value (B, Hkv, Lk, Dv)."""


class DenseWeights(NamedTuple):
    """The weights of a call written by hand, and how they were computed."""

    weights: Tensor  # (B, Hq, Lq, Lk)
    logits: Callable[[Tensor, Tensor], Tensor]  # (B, Hq, Lq, Lk) from query and key
    softmax: Callable[[Tensor], Tensor]  # weights from logits


Editor = Callable[[str], "CallEdits | None"]
# (query, key, value, mask, backend=, **options) -> (out, lse), or None for a call that is to be computed here
Elsewhere = Callable[..., "tuple[Tensor, Tensor] | None"]


class PassiveMode:
    """Mixed into a `TorchFunctionMode` that only observes: a call may be computed without the mode if the observers are
    notified."""


class PassiveHook:
    """Mixed into a forward hook of a module that only notes which module runs, for the calls observed inside."""

    @property
    def awaits(self) -> bool:
        """Whether the hook does more: it begins or ends what is observed."""
        raise NotImplementedError


def passive(*hooks: Mapping[Any, Any]) -> bool:
    """Whether a step may be computed without the modules of these hooks; `notify_step` calls those that matter."""
    return all(isinstance(hook, PassiveHook) and not hook.awaits for table in hooks for hook in table.values())


class _Thread(threading.local):
    observers: tuple[Observer, ...] = ()
    editor: Editor | None = None  # it is asked only where there are observers, too
    elsewhere: Elsewhere | None = None  # likewise


THREAD = _Thread()
_PADDING_IN_PLACE: ThreadBlocks[None] = ThreadBlocks()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """A block in which `observer` receives every attention call of this thread."""
    before = THREAD.observers
    THREAD.observers = (*before, observer)
    try:
        yield
    finally:
        THREAD.observers = before


@contextmanager
def computed_by(elsewhere: Elsewhere) -> Iterator[None]:
    """A block in which `elsewhere` may compute this thread's calls of `saccade.attention`, before they are checked.
    Those that it leaves go to the block around this one."""
    before = THREAD.elsewhere

    def ask(*args: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
        computed = elsewhere(*args, **options)
        return before(*args, **options) if computed is None and before is not None else computed

    THREAD.elsewhere = ask
    try:
        with observed_by(_nobody):
            yield
    finally:
        THREAD.elsewhere = before


def _nobody(call: ObservedCall) -> None:
    """Keeps calls from the shortest way, which asks no one."""


def notify(observers: tuple[Observer, ...], call: ObservedCall) -> None:
    for observer in observers:
        observer(call)


def notify_step(module: Any, call: ObservedCall) -> None:
    """Notify observers of a call that a native step computed in place of this module of attention."""
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    with aside() as observers:
        notify(observers, call)
    for hook in module._forward_hooks.values():
        hook(module, (), None)


def notify_edited(observers: tuple[Observer, ...], edited: EditedOutput, source: str, module: Any = None) -> Tensor:
    """Notify observers of an edited call as it was computed, and return its output."""
    if edited.call is not None:
        call = edited.call.observed(edited.out, source, module)
        notify(observers, replace(call, used=call.graph_tensors()))  # which rows are tokens is known by now
    return edited.out


def edits_of(source: str) -> CallEdits | None:
    """The edits for the call that `source` is about to compute; None if this thread has no editor."""
    return None if THREAD.editor is None else THREAD.editor(source)


def padding_in_place() -> AbstractContextManager[None]:
    """A block in which this thread's models keep padded batches, instead of joining all items in one row.

    Edits of calls need the axis of batch items.
    """
    return _PADDING_IN_PLACE.holding(None)


def wants_padding_in_place() -> bool:
    """Whether this thread is in a block of `padding_in_place`."""
    return bool(_PADDING_IN_PLACE.thread.held.values)


@contextmanager
def aside() -> Iterator[tuple[Observer, ...]]:
    """Observers are not notified of calls inside: they are part of one call, which is reported as a whole. Yields
    the observers for that report."""
    before, editor = THREAD.observers, THREAD.editor
    THREAD.observers, THREAD.editor = (), None
    try:
        yield before
    finally:
        THREAD.observers, THREAD.editor = before, editor
