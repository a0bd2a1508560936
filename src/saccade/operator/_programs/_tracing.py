"""Functions of scores and indices as programs: traced once, and read again while what they reach stays the same.

`traced(fn, leaves)` calls the function with symbols (`_symbols.py`). Operations on symbols become nodes of a program.
Operations on captured tensors alone (`torch.exp(slopes)`, `bias.t()`) are kept as steps and run again at every call,
so that gradients flow to the captured tensors and changes of them are seen. What such steps say to Python (a shape, an
`.item()`) is compared at every call, and the function is traced again where it changed.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .._surroundings import describe, lasting
from ._arrays import leaf
from ._captured import Reached, reached
from ._language import LEAVES, Program
from ._recording import Recorder, Refused, Trace
from ._values import NotTraceable

__all__ = ["NotTraceable", "Traced", "traced"]

_FUNCTIONS = 512  # whose traces are kept
_VARIANTS = 8  # of each: other shapes, other values of captured tensors
_DTYPES = {"float": torch.float32, "int": torch.int32}


class Traced(NamedTuple):
    """A function as a program.

    Attributes:
        program: the same object while the code and the captured values are the same. Its loads have the number of
            their table as value, and an int node for each axis of it.
        tables: the tensors as of this call, differentiable.
    """

    program: Program
    tables: list[Tensor]


def traced(
    fn: Callable[..., Tensor],
    leaves: Sequence[str],
    *,
    name: str = "score_mod",
    device: torch.device | str | None = None,
) -> Traced:
    """The program of `fn`, called with `leaves` as tensors of shape ().

    Args:
        fn: a function of the leaves that returns one value.
        leaves: "score", "b", "h", "q", "k" for a score function; without "score" for a mask function.
        name: what errors call the function.
        device: where captured tensors must be; None: anywhere.

    Raises:
        NotTraceable: the language cannot say what `fn` does.
        TypeError: `fn` is not callable, does not take these arguments, or returns something other than a float tensor
            (with "score") or a bool tensor (without).
        ValueError: `fn` returns a tensor of another shape than (), writes to what it captured, or captured tensors of
            another device.
    """
    fn = getattr(fn, "_torchdynamo_orig_callable", fn)  # of a function that torch.compile wrapped
    if not callable(fn):
        raise TypeError(f"{name} must be a function of ({', '.join(leaves)}), got {describe(fn)}")
    walked = reached(fn)
    key = (walked.key, tuple(leaves))
    traces = _known(key) if walked.guarded else ()
    for trace in traces:
        values = trace.read(walked.tensors)
        if values is not None:
            return _checked(trace, values, name, device)
    trace, guarded = _traced(fn, leaves, walked, name)
    if walked.guarded and guarded:
        _keep(key, trace)
    values = trace.read(walked.tensors)
    if values is None:
        raise NotTraceable("its answers about captured tensors differ from call to call")
    return _checked(trace, values, name, device)


# --- what is kept of a trace ----------------------------------------------------------------------------------------


_TRACES: OrderedDict[Any, list[Trace]] = OrderedDict()


def _known(key: Any) -> Sequence[Trace]:
    traces = _TRACES.get(key)
    if traces is None:
        return ()
    _TRACES.move_to_end(key)
    return tuple(traces)


def _keep(key: Any, trace: Trace) -> None:
    traces = _TRACES.setdefault(key, [])
    traces.insert(0, trace)
    del traces[_VARIANTS:]
    while len(_TRACES) > _FUNCTIONS:
        _TRACES.popitem(last=False)


def _checked(trace: Trace, tables: list[Tensor], name: str, device: torch.device | str | None) -> Traced:
    if trace.program is None:
        raise NotTraceable(trace.reason)
    if device is not None:
        wanted = torch.device(device)
        for table in tables:
            if table.device != wanted:
                raise ValueError(f"{name} captured {describe(table)} on {table.device}; expected device {wanted}")
    return Traced(trace.program, tables)


# --- the trace ------------------------------------------------------------------------------------------------------


def _traced(fn: Callable[..., Any], leaves: Sequence[str], walked: Reached, name: str) -> tuple[Trace, bool]:
    check_arguments(fn, leaves, name)
    if walked.writes is not None:
        raise ValueError(f"{name} must not have side effects: it binds the outer variable {walked.writes!r}")
    recorder = Recorder(walked.tensors, name)
    try:
        node = _recorded(fn, leaves, recorder)
        _check_unknown(fn, leaves, walked, recorder)
    except NotTraceable as refused:
        return recorder.trace(None, refused.reason), recorder.guarded
    finally:
        _check_lists(walked, name)
    return recorder.trace(node), recorder.guarded


def _check_lists(walked: Reached, name: str) -> None:
    for held, length in walked.lists:
        if len(held) > length:
            del held[length:]
            raise ValueError(f"{name} must not have side effects: it appends to a list that it captured")


def _check_unknown(fn: Callable[..., Any], leaves: Sequence[str], walked: Reached, recorder: Recorder) -> None:
    """Check that tensors of unknown origin are the same for other symbols. Otherwise foreign code may have computed
    them from the symbols."""
    if not recorder.unknown:
        return
    again = Recorder(walked.tensors, recorder.name, fill=recorder.fill + 1)
    _recorded(fn, leaves, again)
    same = len(again.unknown) == len(recorder.unknown)
    if not same or not all(a is b or torch.equal(a, b) for a, b in zip(again.unknown, recorder.unknown, strict=True)):
        raise NotTraceable("foreign code that computes with its arguments")


@lasting
def _recorded(fn: Callable[..., Any], leaves: Sequence[str], recorder: Recorder) -> int:
    with _disable_current_modes(), torch.enable_grad():
        given = [leaf(recorder, name, _DTYPES[LEAVES[name]]) for name in leaves]
        try:
            with recorder:
                result = fn(*given)
        except (NotTraceable, Refused) as refused:
            raise (refused.error if isinstance(refused, Refused) else refused) from None
        except Exception as error:
            # It may work with ordinary tensors; if it does not, it is run there, and raises its own error.
            raise NotTraceable(f"tracing it raised {type(error).__name__}: {error}") from error
        return recorder.output(result, "score" in leaves)


def check_arguments(fn: Callable[..., Any], leaves: Sequence[str], name: str) -> None:
    """TypeError for a function that cannot be called with these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # of a function without one nothing can be said
    try:
        signature.bind(*leaves)
    except TypeError:
        raise TypeError(
            f"{name} must take the {len(leaves)} arguments ({', '.join(leaves)}), got a function of {signature}"
        ) from None
