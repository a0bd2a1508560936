"""Other calls of a target than the one that its reading names: with an optional mask, with a boolean flag the other
way round, and with both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ._reading import MaskReading
from ._steady import exact, steady, tolerance
from ._subject import Subject
from .discovery._signature import TargetArgument, arguments_of

_MOST = 6  # variants that are tried
_LENGTHS = (2, 7, 17, 33)
# Flags that say how to compute or what else to return, and not what.
_HARMLESS = (
    r"(use_|enable_|with_|is_)?(flash|sdpa|fused|fast|efficient|memory_efficient|mem_efficient|kernel|math|xformers"
    r"|triton|optimi[sz]ed|chunk(ed)?|contiguous|checkpoint(ing)?)(_\w+)?"
    r"|(return|output|need|want|keep|store|save|log|debug|verbose|get|with)_\w+|verbose|debug"
)
_OTHERS = ("flag", "training", "inference", "dropout", "use_cache", "cache", "mask", "head_mask")


@dataclass(frozen=True, eq=False)
class CallVariant:
    """One other call."""

    words: str  # "need_weights=False", "`mask` given"
    subject: Subject
    harmless: bool  # whether it must compute what the plain call computes
    by: float  # how far its output is from the plain call's
    size: float  # of the plain call's output
    named: bool = False  # whether a check has said already what is wrong with it


def variants(subject: Subject, causal: bool | None) -> tuple[CallVariant, ...]:
    """Those whose outputs differ from the plain call's; others compute the same function, and are not tried further.

    Args:
        causal: the direction of the plain call; what must compute the same promises the same direction.
    """
    from ._models import takes_tokens  # here: it brings tokenizers, and importing Saccade is light

    if subject.module is not None and takes_tokens(subject.target):
        return ()  # whole models: the model check gives masks
    try:
        return tuple(_differing(subject, causal))
    except (Exception, SystemExit):  # two calls differ, or none works: a check meets it again
        return ()


def _differing(subject: Subject, causal: bool | None) -> Iterator[CallVariant]:
    plain = exact(subject)
    lengths = [one for one in _LENGTHS if one <= (subject.reading.max_length or one)]
    before = {length: steady(plain, plain.inputs(2, length, dtype=plain.dtype)).out for length in lengths}
    if any(not one.isfinite().all() for one in before.values()):
        return
    masks: list[MaskReading | None] = [None, *(mask for mask in subject.reading.masks if _is_plain(mask))]
    flags: list[TargetArgument | None] = [None, *_flags(subject)]
    pairs = sorted(product(flags, masks), key=lambda pair: (pair[0] is not None) + (pair[1] is not None))
    differing: list[object] = []
    for flag, mask in pairs[1 : 1 + _MOST]:
        other = None if flag in differing or mask in differing else _called(subject, flag, mask)
        if other is None:
            continue
        harmless = (flag is None or _is_harmless(flag)) and (mask is None or not mask.by_pair or not causal)
        if harmless and causal is not None:
            other = replace(other, promise=replace(other.promise, causal=causal))
        by, size = _apart(exact(other), before)
        if by > 0:
            differing += [part for part in (flag, mask) if part is not None]
            yield CallVariant(_words(subject, flag, mask), other, harmless, by, size)


def _flags(subject: Subject) -> list[TargetArgument]:
    reading = subject.reading
    used = {*reading.names, reading.causal_flag, *(mask.argument for mask in reading.masks)}
    cache = reading.cache
    used |= set() if cache is None else {cache.flag, cache.argument}
    return [
        one
        for one in arguments_of(subject.target)
        if isinstance(one.default, bool) and one.role not in _OTHERS and not one.by_place and one.name not in used
    ]


def _is_plain(mask: MaskReading) -> bool:
    """An optional mask whose meaning is known: one that hides nothing can be given."""
    return not mask.required and mask.behaves in (None, mask.meaning)


def _is_harmless(flag: TargetArgument) -> bool:
    return flag.role in ("weights_flag", "averaged", "gqa") or bool(re.fullmatch(_HARMLESS, flag.name.lower()))


def _called(subject: Subject, flag: TargetArgument | None, mask: MaskReading | None) -> Subject | None:
    """The subject called so; None where no such call gives an output of the same shape."""
    reading = subject.reading
    constants = dict(reading.constants)
    if flag is not None:
        constants[flag.name] = not constants.get(flag.name, flag.default)
    if mask is not None:
        reading = replace(reading, masks=tuple(replace(one, required=one is mask) for one in reading.masks))
    places: list[tuple[Any, Any]] = [(reading.out, reading.weights)]
    places += [] if flag is None else [(reading.out, None), (None, None), (0, None)]
    inputs = subject.inputs(2, 5)
    shape = steady(subject, inputs).out.shape
    for out, weights in dict.fromkeys(places):
        other = replace(subject, reading=replace(reading, constants=constants, out=out, weights=weights))
        try:
            if steady(other, inputs).out.shape == shape:
                return other
        except (Exception, SystemExit):  # no such call
            continue
    return None


def _apart(other: Subject, before: dict[int, Tensor]) -> tuple[float, float]:
    """(the largest difference that is no rounding, the size of the outputs there)."""
    found = (0.0, 0.0)
    for length, out in before.items():
        inputs = other.inputs(2, length, dtype=out.dtype if out.is_floating_point() else None)
        try:
            after = steady(other, inputs).out
        except (Exception, SystemExit):  # it takes no such length
            continue
        if after.shape != out.shape:
            continue
        gap = (after.double() - out.double()).abs().nan_to_num(nan=torch.inf)
        if (by := float(gap.max())) > max(tolerance(other, inputs, out), found[0]):
            found = (by, float(out.abs().max()))
    return found


def _words(subject: Subject, flag: TargetArgument | None, mask: MaskReading | None) -> str:
    words = []
    if flag is not None:
        words.append(f"{flag.name}={not subject.reading.constants.get(flag.name, flag.default)}")
    if mask is not None:
        words.append(f"a `{mask.argument}` that hides nothing")
    return " and ".join(words)
