"""Finds out how to call a target: its form, layout, sizes and results, and the meaning of its masks.

An adapter or a whole `Reading` of the user's wins. Else its arguments' names say what they are, its source and
documentation say how their axes stand, and trial calls decide the rest. Inferred settings are listed in
`Reading.assumed`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...findings._finding import TargetError, Undecided
from .._construct import construct, guessed
from .._kinds import check, unwrapped
from .._layers import layer_subject
from .._models import takes_tokens, token_subject
from .._reading import Hints, MaskReading, Promise, Reading
from .._shortened import shortened
from .._subject import Subject, copied
from . import _sizes
from ._caches import with_cache
from ._documentation import DocumentedSource
from ._forms import HEADS, WIDTH, TargetClues, is_pytorch, read
from ._masks import with_masks, with_own_masks
from ._returns import with_returns
from ._signature import applied, arguments_of
from ._trials import TargetTrials, unnoticed

_FORMS = {("query", "key", "value"): "attention", ("x", "context"): "cross", ("x",): "self", ("tokens",): "tokens"}


def discover(
    target: Any,
    hints: Hints | None = None,
    promise: Promise | None = None,
    how: Any = None,
    arguments: Mapping[str, Any] | None = None,
) -> Subject:
    """The target as checks call it, in eval mode and on a copy of its own where it is a module.

    Args:
        target: a function, a module, a class of modules, or a model of transformers.
        hints: what the user says of how to call it.
        promise: what its author promises.
        how: a `Reading`, `Hints`, or an adapter, as `saccade.verify` says.
        arguments: of the class's constructor; those of another name are given in every call.

    Raises:
        Undecided: more than one way to call it fits, or none.
        TargetError: it raises however it is called.
        TypeError: it is nothing that can be called with tensors.
    """
    promise, given = promise or Promise(), dict(arguments or {})
    hints = how if isinstance(how, Hints) else hints or Hints()
    check(target)
    target, wrapped = unwrapped(target)
    again = None
    if inspect.isclass(target) and issubclass(target, torch.autograd.Function):
        target = applied(target)
    elif inspect.isclass(target):
        again = partial(_another, target, given, hints, promise)
        wrapped = (*wrapped, *guessed(target, given, hints, promise))
        target, given = construct(target, given, hints, promise)
    short, left_out = shortened(target) if how is None or isinstance(how, Hints) else (target, ())
    if left_out:
        try:
            subject = _discovered(short, hints, promise, how, given, (*wrapped, *left_out))
        except (Undecided, TargetError):  # it needs what was left out
            pass
        else:
            return replace(subject, again=None if again is None else partial(_another_short, again))
    subject = _discovered(target, hints, promise, how, given, wrapped)
    return replace(subject, again=again)


def _discovered(
    target: Any, hints: Hints, promise: Promise, how: Any, given: Mapping[str, Any], wrapped: tuple[str, ...]
) -> Subject:
    if isinstance(target, nn.Module):
        target = _eval_copy(target)
    with unnoticed():
        if isinstance(how, Reading):
            return Subject(target, how, promise)
        if callable(how):
            return Subject(target, adapted(target, how, hints), promise)
        subject = _known_kind(target, hints, promise) or Subject(
            target, _found_reading(target, hints, promise, given), promise
        )
        assumed = (*wrapped, *subject.reading.assumed)
        return replace(subject, reading=replace(subject.reading, assumed=assumed))


def _another(target: type, given: Mapping[str, Any], hints: Hints, promise: Promise) -> nn.Module:
    """Another instance of a class, with other random numbers."""
    made: nn.Module = construct(target, given, hints, promise, seed=1)[0]
    return made


def _another_short(again: Callable[[], nn.Module]) -> nn.Module:
    short: nn.Module = shortened(again())[0]
    return short


def _known_kind(target: Any, hints: Hints, promise: Promise) -> Subject | None:
    """A whole model, or a layer of one of transformers' models; None for all else."""
    scripted = isinstance(target, torch.jit.ScriptModule)
    if hints.form in (None, "tokens") and not scripted and takes_tokens(target):
        return token_subject(target, promise)
    if hints.form in (None, "self") and isinstance(target, nn.Module) and not scripted:
        return layer_subject(target, promise)
    return None


def _found_reading(target: Any, hints: Hints, promise: Promise, given: Mapping[str, Any]) -> Reading:
    trials = TargetTrials(target)
    _check_taken(target, given)
    clues, assumed = _settled(
        trials, TargetClues(target, arguments_of(target), DocumentedSource.of(target), hints, given)
    )
    reading = with_masks(trials, clues, promise, read(trials, clues))
    reading = with_own_masks(trials, clues, promise, reading)
    reading = with_cache(trials, clues, replace(reading, assumed=(*assumed, *reading.assumed)))
    return _with_flag(trials, clues, reading)


def _check_taken(target: Any, given: Mapping[str, Any]) -> None:
    """Undecided for an argument that neither the constructor nor a call takes: its name is probably misspelled."""
    try:
        parameters = inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            known = ", ".join(parameters) or "none"
            made = ", ".join(inspect.signature(type(target)).parameters) if isinstance(target, nn.Module) else ""
            constructor = f"its constructor takes {made}, and " if made else ""
            raise Undecided(
                f"nothing takes the argument {name!r}: {constructor}a call takes {known}",
                [("leave it out, or name one that is taken", "--arg NAME=VALUE")],
            )


def _with_flag(trials: TargetTrials, clues: TargetClues, reading: Reading) -> Reading:
    """The reading with the argument that makes the target causal, if a call accepts it."""
    flag = next((argument.name for argument in clues.of("flag", given=False)), None)
    if flag is None or is_pytorch(clues.target):
        return reading
    flagged = replace(reading, constants={**reading.constants, flag: True})
    return reading if trials.returned(flagged) is None else replace(reading, causal_flag=flag)


def _eval_copy(module: nn.Module) -> nn.Module:
    """A copy in eval mode; the module itself if it cannot be copied."""
    try:
        module = copied(module)
    except Exception:  # what a target's own __deepcopy__ may raise is not known
        return module.eval()
    return module.eval()


# Arguments that must be given and whose names say nothing: each is tried as what it may be


def _settled(trials: TargetTrials, clues: TargetClues) -> tuple[TargetClues, tuple[str, ...]]:
    """The clues with a role for each argument that must be given, and what was assumed of it.

    Raises:
        Undecided: more than one way works, or none, for an argument without a telling name.
    """
    if clues.hints.mask is not None:
        clues = _with_roles(clues, {clues.hints.mask: "mask"})
    unknown = [argument.name for argument in clues.of("", given=False) if argument.required]
    if not unknown:
        return clues, ()
    ways = [(words, option, way) for words, option, way in _ways(clues, unknown) if _works(trials, way)]
    if len(ways) > 1:
        raise Undecided(
            f"what {', '.join(unknown)} is cannot be inferred from the signature, and more than one way of calling "
            "works",
            [(words, option) for words, option, _ in ways],
        )
    if not ways:
        return clues, ()  # giving them will say which argument is not known
    words, _, way = ways[0]
    return way, (f"{words}, because the call works so",)


def _ways(clues: TargetClues, unknown: list[str]) -> Iterator[tuple[str, str, TargetClues]]:
    names = [argument.name for argument in clues.arguments if argument.required and argument.name not in clues.given]
    form = clues.hints.form
    if len(names) == 3 and not clues.has("mask") and form in (None, "attention", "qkv"):
        roles = dict(zip(names, ("query", "key", "value"), strict=True))
        option = f"--form {'qkv' if clues.has_matrices else 'attention'}"
        yield f"{', '.join(names)} are query, key and value", option, _with_roles(clues, roles)
    if len(unknown) != 1 or not clues.has("x"):
        return
    name = unknown[0]
    if form in (None, "cross"):
        way = _with_roles(clues, {name: "context"})
        yield (
            f"{name} is the context that x attends to",
            "--form cross",
            replace(way, hints=replace(way.hints, form="cross")),
        )
    if form in (None, "self"):
        yield f"{name} is a mask", f"--mask {name}", _with_roles(clues, {name: "mask"})


def _with_roles(clues: TargetClues, roles: dict[str, str]) -> TargetClues:
    arguments = tuple(replace(argument, role=roles.get(argument.name, argument.role)) for argument in clues.arguments)
    return replace(clues, arguments=arguments)


def _works(trials: TargetTrials, clues: TargetClues) -> bool:
    trial = TargetTrials(trials.target)
    try:
        read(trial, clues)
    except (Undecided, TargetError):
        return False
    return True


def adapted(target: Any, adapter: Callable[..., Any], hints: Hints) -> Reading:
    """The reading that calls `adapter(target, ...)`.

    Raises:
        Undecided: its parameters are none of the forms, or no call of it works.
    """
    names = list(inspect.signature(adapter).parameters)[1:]
    inputs = tuple(name for name in names if name != "mask")
    if inputs not in _FORMS:
        raise Undecided(
            f"the adapter takes ({', '.join(names)}) after the target, expected (query, key, value), (x), (x, context) "
            "or (tokens), each with or without mask"
        )
    trials = TargetTrials(target)
    for reading in _candidates(target, _FORMS[inputs], inputs, hints):
        reading = replace(reading, call=adapter)
        given = trials.inputs(reading)
        returned = trials.returned(reading, given, f"width {reading.width}")
        source = DocumentedSource.of(adapter)
        complete = None if returned is None else with_returns(reading, returned, given, source, hints)
        if complete is not None:
            masks = (MaskReading("mask", "BHQK", "attend"),) if "mask" in names else ()
            return replace(complete, masks=masks, assumed=("it is called through the adapter",))
    errors = list(trials.errors.values())
    if len({error.error for error in errors}) == 1:
        raise errors[0]
    raise Undecided(
        f"no call of the adapter works ({'; '.join(error.error for error in errors[:2])})",
        [("its width", "--embed-dim N")],
    )


def _candidates(target: Any, form: Any, names: tuple[str, ...], hints: Hints) -> Iterator[Reading]:
    module = isinstance(target, nn.Module)
    heads = hints.num_heads or (_sizes.heads(target) if module else None)
    if form == "tokens":
        yield Reading("tokens", "BL", 0, names=names, vocabulary=50)
        return
    if form == "attention":
        head_width = next(_sizes.head_widths(target), None) if module else None
        yield Reading(form, "BHLD", hints.embed_dim or head_width or WIDTH, heads or HEADS, names=names)
    else:
        for width in _sizes.widths(target, hints.embed_dim):
            for other in _sizes.context_widths(target, width) if form == "cross" else [None]:
                yield Reading(form, "BLD", width, heads, context_width=other, names=names)
    if form == "attention":
        for width in _sizes.widths(target, hints.embed_dim):
            yield Reading("qkv", "BLD", width, heads, names=names)
