"""How a target keeps keys and values from call to call: in what it returns, in an object it is given, or inside.

Names say that there is a cache; a call says where it comes back.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._construct import construct
from .._finding import TargetError, Undecided
from .._reading import CacheReading, Hints, Reading
from ._forms import Clues
from ._needed import Filled
from ._trials import Trials

_RESETS = r"(reset|clear|empty|init|flush)(_?(kv_?)?(cache|state|memory)s?)?"
_STEPS = ("step", "decode_step", "forward_step", "decode", "forward_one", "step_forward", "incremental_forward")


def with_cache(trials: Trials, clues: Clues, reading: Reading) -> Reading:
    """The reading with its cache, where it has one."""
    if reading.form == "attention" or not clues.is_module:
        return reading
    argument = next((one.name for one in clues.arguments if one.role == "cache"), None)
    flag = next((one.name for one in clues.arguments if one.role == "use_cache"), None)
    starts = (one for one in clues.arguments if one.role == "start" and (one.required or one.default is not None))
    start = next((one.name for one in starts), None)
    found = None
    if argument is not None:
        found = _passed(trials, reading, argument, flag, start) or _made(trials, clues, reading, argument, flag, start)
    elif flag is not None or _step(clues.target) or (start is not None and _keeps(clues)):
        found = CacheReading("inside", reset=_reset(clues.target), position=start, flag=flag, step=_step(clues.target))
    if found is None or (found.position is not None and _always_from_0(reading)):
        return reading
    return replace(reading, cache=found, assumed=(*reading.assumed, _told(found)))


def _always_from_0(reading: Reading) -> bool:
    """Whether angles are made for each call's own positions, which those of a later piece are not: a caller slices
    them out of its table, and says so in no way that could be tried."""
    return isinstance(reading.call, Filled) and bool(reading.call.makers)


def _keeps(clues: Clues) -> bool:
    """Whether the module keeps something: by the names of what it holds, or of what its source says that it will."""
    held = (name for part in clues.target.modules() for name in (*vars(part), *part._buffers))
    words = r"cache|past|kept|history"
    return re.search(rf"self\.\w*({words})", clues.source.whole) is not None or any(
        re.search(words, name) for name in held
    )


def _passed(
    trials: Trials, reading: Reading, argument: str, flag: str | None, start: str | None
) -> CacheReading | None:
    """What is returned beside the output and the weights, and holds tensors, is what the next call takes."""
    constants = {**reading.constants, **({flag: True} if flag else {})}
    returned = trials.returned(replace(reading, constants=constants))
    inputs = trials.inputs(reading)
    lengths = (inputs.length, inputs.key_length)
    for where, one in _parts(returned):
        if where not in (reading.out, reading.weights) and _holds_tensors(one) and not _are_scores(one, lengths):
            return CacheReading("passed", argument, where, position=start, flag=flag)
    return None


def _parts(returned: Any) -> Iterator[tuple[int | str, Any]]:
    if isinstance(returned, dict):
        yield from ((str(key), one) for key, one in returned.items())
    elif isinstance(returned, (tuple, list)):
        yield from reversed(list(enumerate(returned)))
    elif hasattr(returned, "__dict__") and not isinstance(returned, Tensor):
        yield from vars(returned).items()


def _are_scores(one: Any, lengths: tuple[int, int]) -> bool:
    """Scores or weights (..., Lq, Lk), as Whisper's attention returns them, are nothing to pass on."""
    return isinstance(one, Tensor) and one.dim() >= 3 and tuple(one.shape[-2:]) == lengths


def _holds_tensors(one: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dim() >= 3
    if isinstance(one, (tuple, list)):
        return any(map(_holds_tensors, one))
    held = one if isinstance(one, dict) else getattr(one, "__dict__", {})
    return any(map(_holds_tensors, held.values()))


def _made(
    trials: Trials, clues: Clues, reading: Reading, argument: str, flag: str | None, start: str | None
) -> CacheReading | None:
    """An object of the one class of the target's file whose name says cache, where a call takes it."""
    for make in _makers(clues.target):
        try:
            constants = {**reading.constants, argument: make(), **({flag: True} if flag else {})}
        except (TargetError, Undecided):
            continue
        if trials.returned(replace(reading, constants=constants)) is not None:
            return CacheReading("made", argument, make=make, position=start, flag=flag)
    return None


def _makers(target: nn.Module) -> Iterator[Callable[[], Any]]:
    for name in ("make_cache", "new_cache", "init_cache", "cache", "empty_cache", "create_cache"):
        method = getattr(target, name, None)
        if inspect.ismethod(method) and not _needed(method):
            yield method
    file = sys.modules.get(type(target).__module__)
    for name, kind in vars(file).items() if file else ():
        if (
            inspect.isclass(kind)
            and re.search("cache", name, re.IGNORECASE)
            and kind.__module__ == type(target).__module__
        ):
            yield functools.partial(_constructed, kind)


def _constructed(kind: type) -> Any:
    return construct(kind, {}, Hints())[0]


def _needed(method: Any) -> list[str]:
    return [one.name for one in inspect.signature(method).parameters.values() if one.default is one.empty]


def _reset(target: nn.Module) -> str | None:
    methods = (name for name in dir(type(target)) if not hasattr(nn.Module, name))
    found = [name for name in methods if re.fullmatch(_RESETS, name) and not _needed(getattr(target, name))]
    return min(found, key=lambda name: "cache" not in name, default=None)


def _step(target: nn.Module) -> str | None:
    """A method that takes the next positions in place of a call."""
    for name in _STEPS:
        method = getattr(target, name, None)
        if inspect.ismethod(method) and len(_needed(method)) == 1:
            return name
    return None


def _told(cache: CacheReading) -> str:
    if cache.kind == "passed":
        return f"{cache.argument} takes what an earlier call returned at {cache.returned!r}"
    if cache.kind == "made":
        return f"{cache.argument} takes a cache that is changed in place"
    ways = [f"{cache.position} is the first position of the call"] if cache.position else []
    ways += [f"{cache.flag}=True keeps them"] if cache.flag else []
    ways += [f"{cache.step}(x) takes the next position"] if cache.step else []
    ways += [f"{cache.reset}() empties it"] if cache.reset else []
    return f"it keeps keys and values inside ({', '.join(ways)})"
