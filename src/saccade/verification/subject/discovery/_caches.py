"""Finds where a target keeps keys and values between calls: in its result, in an object that it is given, or inside.

Names say that there is a cache; a call says where it comes back.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ....support._restored import set_seed
from ...findings._finding import Inapplicable, TargetError, Undecided
from .._construct import construct
from .._decoder import CachedDecoder, numbered
from .._inputs import Side
from .._reading import CacheReading, Hints, Reading
from .._subject import Subject, copied
from ._forms import TargetClues
from ._needed import FilledCall
from ._returns import with_returns
from ._signature import TargetArgument
from ._trials import TargetTrials, differs

_RESETS = r"(reset|clear|empty|init|flush)(_?(kv_?)?(cache|state|memory)s?)?"
# Errors that a tensor raises instead of an object, or an object instead of a tuple.
_OF_ANOTHER_KIND = ("AttributeError", "TypeError", "KeyError", "IndexError", "ValueError")
_STEPS = ("step", "decode_step", "forward_step", "decode", "forward_one", "step_forward", "incremental_forward")


def with_cache(trials: TargetTrials, clues: TargetClues, reading: Reading) -> Reading:
    """The reading with the target's cache. If an argument only looks like a cache, the reading with the reason why it
    cannot be used."""
    if reading.form == "attention" or not clues.is_module:
        return reading
    search = _CacheSearch(trials, clues, reading)
    cache = search.found()
    if cache is None:
        return replace(reading, unread_cache=search.why_not())
    cache = search.numbered(cache)
    assumed = (*reading.assumed, _in_words(cache))
    assumed = tuple(words for words in assumed if words != f"{cache.flag}=False in every call")
    return replace(reading, cache=cache, assumed=assumed)


@dataclass(frozen=True, eq=False)
class _CacheSearch:
    """Trial calls of a target with a cache. Each trial uses its own copy of the target, so that no state of an earlier
    trial remains."""

    trials: TargetTrials
    clues: TargetClues
    reading: Reading

    def found(self) -> CacheReading | None:
        if self._angles():
            return None
        arguments = self.clues.of("cache", given=False)
        flags = [flag.name for flag in self.clues.of("use_cache")]
        for flag in flags or (None,):
            for argument in arguments:
                cache = self._passed(argument, flag) or self._made(argument, flag)
                # of several arguments, as one for keys and one for values, one alone may be no cache
                if cache is not None and (len(arguments) == 1 or self._remembers(cache)):
                    return cache
        cache = None if arguments else self._inside(next(iter(flags), None))
        return cache or next(self._by_behaviour(arguments), None)

    def why_not(self) -> str:
        """Why an argument that looks like a cache cannot be used as one; "" if there is none."""
        names = [argument.name for argument in self.clues.of("cache", "use_cache")]
        if not names:
            return ""
        if self._angles():
            return (
                f"{names[0]} is not tried: which {', '.join(self._angles())} a later step is given, only its caller "
                "knows"
            )
        return (
            f"no way to use {', '.join(names)} was found: no call returns, changes or keeps what a later one could "
            "take; name the flag that switches it on (--arg NAME=True), or say it in Python, "
            "how=Reading(..., cache=CacheReading(...))"
        )

    def numbered(self, cache: CacheReading) -> CacheReading:
        """The cache with the argument for position numbers, if passing the numbers from 0 on changes no output."""
        name = next((argument.name for argument in self.clues.of("positions")), None)
        if name is None or cache.position is not None or name in self.clues.given:
            return cache
        inputs = self.trials.inputs(self.reading)
        plain = self.trials.out(self.reading, inputs)
        for axes in ("BL", "L"):
            named = {**self.reading.constants, name: numbered(inputs, axes)}
            out = self.trials.out(replace(self.reading, constants=named), inputs)
            if plain is not None and out is not None and torch.equal(plain, out):
                return replace(cache, positions=(name, axes))
        return cache

    def _angles(self) -> list[str]:
        """The arguments that expect rotary angles, which are made for positions from 0 on in each call. A caller slices
        them from its table, in a way that no trial call can find."""
        call = self.reading.call
        roles = {argument.name: argument.role for argument in self.clues.arguments}
        return [name for name in call.makers if roles.get(name) != "positions"] if isinstance(call, FilledCall) else []

    def _start(self) -> str | None:
        """The argument that takes the first position of a call."""
        starts = self.clues.of("start")
        return next((start.name for start in starts if start.required or start.default is not None), None)

    # --- in what it returns

    def _passed(self, argument: TargetArgument, flag: str | None) -> CacheReading | None:
        """A cache that is returned together with the output and the weights; None if there is none."""
        first = _empty(argument)
        returned, out = self._first_call({flag: True} if flag else {})
        if out is None:
            return None
        candidates = [
            CacheReading("passed", argument.name, where, first, position=self._start(), flag=flag, out=out.out)
            for where in self._places(returned, out)
        ]
        raised = [self._raised(candidate) for candidate in candidates]
        if "" in raised:
            return candidates[raised.index("")]
        # what is all there is, and of the right kind, is broken where it raises; else it may be no cache
        return candidates[0] if len(raised) == 1 and not raised[0].startswith(_OF_ANOTHER_KIND) else None

    def _places(self, returned: Any, out: Reading) -> list[Any]:
        inputs = self.trials.inputs(self.reading)
        lengths = (inputs.length, inputs.key_length)
        places = [
            where
            for where, part in _parts(returned)
            if where not in (out.out, out.weights) and _holds_tensors(part) and not _are_scores(part, lengths)
        ]
        several = [
            value for value in reversed(places) if isinstance(value, int) and isinstance(returned[value], Tensor)
        ]
        return [*places, tuple(several)] if len(several) > 1 else places

    def _first_call(self, more: dict[str, Any]) -> tuple[Any, Reading | None]:
        """The result of a first call, and a reading with the place of its output; None if the call raises."""
        target = _copy(self.trials.target)
        inputs = self.trials.inputs(self.reading)
        with_more = replace(self.reading, constants={**self.reading.constants, **more})
        returned = replace(self.trials, target=target).returned(with_more, inputs)
        if returned is None:
            return None, None
        shown = inputs if "B" in with_more.layout else inputs.items([0])
        plain = replace(with_more, out=None, weights=None)
        return returned, with_returns(plain, returned, shown, self.clues.source, self.clues.hints)

    # --- in an object that it is given

    def _made(self, argument: TargetArgument, flag: str | None) -> CacheReading | None:
        """A cache object for the argument: an instance of the only class in the target's file whose name contains
        "cache", or a dict or list (empty, or of None) if a call accepts and fills it."""
        for make, is_plain in self._stores(argument):
            try:
                store = make()
            except (TargetError, Undecided):
                continue
            returned, out = self._first_call({argument.name: store, **({flag: True} if flag else {})})
            if returned is None or (is_plain and not _holds_tensors(store)):
                continue
            where = out.out if out is not None else None
            return CacheReading("made", argument.name, make=make, position=self._start(), flag=flag, out=where)
        return None

    def _stores(self, argument: TargetArgument) -> Iterator[tuple[Callable[[], Any], bool]]:
        yield from ((make, False) for make in _makers(self.clues.target))
        name = re.escape(argument.name)
        keys = re.findall(rf"\b{name}(?:\.get\()?\[?[\"'](\w+)[\"']", self.clues.source.whole)
        yield dict, True
        yield list, True
        yield functools.partial(dict.fromkeys, list(dict.fromkeys(keys))), True
        yield lambda: [None, None], True

    # --- inside

    def _inside(self, flag: str | None) -> CacheReading | None:
        target, start = self.clues.target, self._start()
        step = _step(target)
        if step is None and not (_has_state(self.clues) and (flag is not None or start is not None)):
            return None
        out = self._first_call({flag: True})[1] if flag else None
        where = None if out is None else out.out
        return CacheReading("inside", reset=_reset(target), position=start, flag=flag, step=step, out=where)

    # --- by flags whose names say nothing

    def _by_behaviour(self, arguments: list[TargetArgument]) -> Iterator[CacheReading]:
        """A cache flag without a telling name: with it set, a second piece depends on the first."""
        for flag in self.clues.arguments:
            if flag.role or flag.default is not False or flag.name in self.clues.given:
                continue
            for argument in arguments:
                cache = self._passed(argument, flag.name) or self._made(argument, flag.name)
                if cache is not None and self._remembers(cache):
                    yield cache
            out = self._first_call({flag.name: True})[1]
            if not arguments and out is not None:
                kept = CacheReading("inside", reset=_reset(self.clues.target), flag=flag.name, out=out.out)
                if self._remembers(kept):
                    yield kept

    def _raised(self, cache: CacheReading) -> str:
        """The error of a call with a second piece; "" if there is none."""
        try:
            self._second(cache)
        except TargetError as error:
            return error.error
        except Inapplicable:  # it takes no batch, as the check says
            return ""
        return ""

    def _remembers(self, cache: CacheReading) -> bool:
        """Whether the output of a second piece depends on the first."""
        try:
            return bool(differs(self._second(cache, 0, last=3), self._second(cache, 1, last=3)).any())
        except (Inapplicable, TargetError):
            return False

    def _second(self, cache: CacheReading, seed: int = 0, last: int = 1) -> Tensor:
        """The output of a second piece of `last` positions. Only the first piece depends on `seed`."""
        side: Side = "query" if self.reading.form == "cross" else "both"
        inputs = self.trials.inputs(self.reading)
        first = self.trials.inputs(self.reading, seed=seed).cut(slice(0, -last), side)
        then = inputs.cut(slice(-last, None), side)
        set_seed(0)
        decoder = CachedDecoder(Subject(_copy(self.trials.target), replace(self.reading, cache=cache)))
        decoder(first)
        return decoder(then)


def _empty(argument: TargetArgument) -> Callable[[], Any] | None:
    """A factory for an argument's default that is an empty container; None if the default is None."""
    default = argument.default
    return functools.partial(copy.copy, default) if isinstance(default, (tuple, list, dict)) else None


def _copy(target: nn.Module) -> nn.Module:
    try:
        return copied(target)
    except Exception:  # what a target's own __deepcopy__ may raise is not known
        return target


def _has_state(clues: TargetClues) -> bool:
    """Whether the module keeps state, judged by the names of its attributes, present or in its source."""
    held = (name for part in clues.target.modules() for name in (*vars(part), *part._buffers))
    words = r"cache|past|kept|history"
    return re.search(rf"self\.\w*({words})", clues.source.whole) is not None or any(
        re.search(words, name) for name in held
    )


def _parts(returned: Any) -> Iterator[tuple[int | str, Any]]:
    if isinstance(returned, dict):
        yield from ((str(key), value) for key, value in returned.items())
    elif isinstance(returned, (tuple, list)):
        yield from reversed(list(enumerate(returned)))
    elif hasattr(returned, "__dict__") and not isinstance(returned, Tensor):
        yield from vars(returned).items()


def _are_scores(value: Any, lengths: tuple[int, int]) -> bool:
    """Whether a value is scores or weights (..., Lq, Lk), as Whisper's attention returns them, and so no cache."""
    return isinstance(value, Tensor) and value.dim() >= 3 and tuple(value.shape[-2:]) == lengths


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() >= 3
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensors, value))
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return any(map(_holds_tensors, held.values()))


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
    return [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty
    ]


def _reset(target: nn.Module) -> str | None:
    methods = (name for name in dir(type(target)) if not hasattr(nn.Module, name))
    names = [name for name in methods if re.fullmatch(_RESETS, name) and not _needed(getattr(target, name))]
    return min(names, key=lambda name: "cache" not in name, default=None)


def _step(target: nn.Module) -> str | None:
    """A method that takes the next positions in place of a call."""
    for name in _STEPS:
        method = getattr(target, name, None)
        if inspect.ismethod(method) and len(_needed(method)) == 1:
            return name
    return None


def _in_words(cache: CacheReading) -> str:
    switched = f", with {cache.flag}=True" if cache.flag else ""
    if cache.kind == "passed":
        return f"{cache.argument} takes what an earlier call returned at {cache.returned!r}{switched}"
    if cache.kind == "made":
        return f"{cache.argument} takes a cache that is changed in place{switched}"
    ways = [f"{cache.position} is the first position of the call"] if cache.position else []
    ways += [f"{cache.flag}=True keeps them"] if cache.flag else []
    ways += [f"{cache.step}(x) takes the next position"] if cache.step else []
    ways += [f"{cache.reset}() empties it"] if cache.reset else []
    return f"it keeps keys and values inside ({', '.join(ways)})"
