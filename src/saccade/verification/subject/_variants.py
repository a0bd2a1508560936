"""Further calls of a target besides the plain call: with optional masks, with inverted boolean flags, and with
combinations of these.

Shape legend: B batch, H heads, L length, D head width, E model width, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..findings._words import article
from ._inputs import NamedInputs
from ._reading import MaskReading, Reading
from ._shortened import LARGE, size_of
from ._source import rates_of, with_rates
from ._steady import exact, repeated, steady, tolerance, vivid
from ._subject import CallResult, Subject
from ._token_models import EncoderDecoderModel, PatchModel
from ._transformers import is_transformers
from .discovery._signature import TargetArgument, arguments_of

_MOST, _MOST_WHOLE = 6, 32  # calls that are tried
_LENGTHS, _WHOLE_LENGTHS = (2, 7, 17, 33), (7, 33)
_PADDED = 11
# Of the largest output, in float64: models take softmax, norms and rotary angles in float32 whatever their type.
_APART_WHOLE = 1e-5
# Flags that say how to compute or what else to return, and not what.
_HARMLESS = (
    r"(use_|enable_|with_|is_)?(flash|sdpa|fused|fast|efficient|memory_efficient|mem_efficient|kernel|math|xformers"
    r"|triton|optimi[sz]ed|chunk(ed)?|contiguous|checkpoint(ing)?)(_\w+)?"
    r"|(return|output|need|want|keep|store|save|log|debug|verbose|get|with)_\w+|verbose|debug"
)
_OTHERS = ("flag", "training", "inference", "dropout", "cache", "mask", "head_mask")
# Of whole models, where None stands for what their configuration says; `**kwargs` of transformers' take them, too.
_RETURNED = {"use_cache": True, "output_attentions": True, "output_hidden_states": True, "return_dict": False}


@dataclass(frozen=True, eq=False)
class CallVariant:
    """A call of the target that differs from the plain one."""

    words: str  # "need_weights=False", "a `mask` that hides nothing"
    subject: Subject
    harmless: bool  # whether it must compute what the plain call computes
    by: float  # how far its output is from the plain call's
    size: float  # of the plain call's output
    where: str = ""  # "at output 3 of item 1, of 7 positions"
    named: bool = False  # whether a check has said already what is wrong with it


@dataclass(frozen=True, eq=False)
class _Change:
    """One difference of a call from the plain one."""

    words: str
    kind: str  # a call makes one change of each kind
    constants: dict[str, Any] = field(default_factory=dict)
    mask: MaskReading | None = None
    harmless: bool = True


@dataclass(frozen=True, eq=False)
class _Situation:
    """Inputs, masks and mode of the calls that are compared."""

    words: str
    inputs: NamedInputs
    masks: dict[str, Tensor] = field(default_factory=dict)
    training: bool = False

    def output(self, subject: Subject) -> Tensor | None:
        """(B, L, E), (B, L, V) or (B, H, L, D) with 0 where it is padded; None if no such call is taken."""
        run: Callable[..., CallResult] = repeated if subject.form == "tokens" else steady
        try:
            with subject.training() if self.training else nullcontext():
                out = run(subject, self.inputs, **self.masks).out
        except (Exception, SystemExit):  # whatever the target raises for these
            return None
        if "padding" not in self.masks:
            return out
        real = self.masks["padding"].to(out.device).unsqueeze(-1)
        return out.masked_fill(~(real if out.dim() == 3 else real[:, None]), 0.0)


def variants(subject: Subject, causal: bool | None) -> tuple[CallVariant, ...]:
    """The calls whose outputs differ from the plain call's; others compute the same function and need no further
    checks.

    Outputs are compared at several lengths, with padding and with a mask by pair where these can be given, and in train
    mode without dropout; of whole models' calls with several changes at one length and with padding.

    Args:
        causal: the direction of the plain call; what must compute the same promises the same direction.
    """
    if isinstance(subject.target, PatchModel):
        return ()  # it takes patches alone
    try:
        return tuple(_differing(subject, causal))
    except (Exception, SystemExit):  # two calls differ, or none works: a check meets it again
        return ()


def _differing(subject: Subject, causal: bool | None) -> Iterator[CallVariant]:
    calls = _calls(subject, causal)
    if not calls:
        return
    plain, before = _compared(subject, causal)
    if not before:
        return
    few = [before[0], *(pair for pair in before if "padding" in pair[0].masks)][:2]
    apart: list[_Change] = []
    for changes in calls:
        reading = None if any(change in apart for change in changes) else _taken(plain, changes, *before[0])
        if reading is None:
            continue
        compared = before if len(changes) == 1 or subject.form != "tokens" else few
        by, size, where = _apart(replace(plain, reading=reading), compared)
        if by > 0:
            apart += changes
            harmless = all(change.harmless for change in changes)
            other = replace(subject, reading=replace(reading, constants=_constants(subject.reading, changes)))
            if harmless and causal is not None:
                other = replace(other, promise=replace(other.promise, causal=causal))
            yield CallVariant(" and ".join(change.words for change in changes), other, harmless, by, size, where)


def _compared(subject: Subject, causal: bool | None) -> tuple[Subject, list[tuple[_Situation, Tensor]]]:
    """The target and its output for comparisons: in float64 if that is finite, otherwise unchanged. Masks of the least
    float64 become -inf if a softmax is computed in float32."""
    for copy in (exact, lambda variant: vivid(variant.fresh())):
        plain = with_rates(copy(subject), rates_of(subject), 0.0)
        before = [
            (situation, out) for situation in _situations(plain, causal) if (out := situation.output(plain)) is not None
        ]
        if all(out.isfinite().all() for _, out in before):
            return plain, before
    return plain, []


# Which calls


def _calls(subject: Subject, causal: bool | None) -> list[tuple[_Change, ...]]:
    """All calls, those with the fewest changes first; modules and large models have at most two changes."""
    whole = subject.form == "tokens"
    changes = [*(_whole_flags(subject) if whole else _flags(subject)), *_masks(subject, causal)]
    kinds = dict.fromkeys(change.kind for change in changes)
    options = [[None, *(change for change in changes if change.kind == kind)] for kind in kinds]
    calls = [tuple(change for change in chosen if change is not None) for chosen in product(*options)]
    most = 2 if not whole or size_of(subject.target) >= LARGE // 4 else len(kinds)
    fewest = sorted((call for call in calls if 0 < len(call) <= most), key=len)
    return fewest[: _MOST_WHOLE if whole else _MOST]


def _masks(subject: Subject, causal: bool | None) -> Iterator[_Change]:
    """Optional masks whose meaning is known: one that hides nothing can be given. Whole models take the other type of
    it, too, and an encoder-decoder one of its source."""
    whole = subject.form == "tokens"
    for mask in subject.reading.masks:
        if mask.required or mask.behaves not in (None, mask.meaning):
            continue
        words = f"{article(str(mask.argument))} `{mask.argument}` that hides nothing"
        yield _Change(words, "mask", mask=mask, harmless=not mask.by_pair or not causal)
        if whole and mask.dtype in ("bool", "int64"):
            other = replace(mask, dtype="int64" if mask.dtype == "bool" else "bool")
            yield _Change(f"{words}, of {other.dtype}", "mask", mask=other)
    source = getattr(subject.target, "masks", (None,))[0] if whole else None
    if source is not None:
        real = torch.ones(1, subject.target.source.shape[1], dtype=torch.long, device=subject.device)
        yield _Change(f"{article(source)} `{source}` of the source that hides nothing", "source", {"source_mask": real})


def _flags(subject: Subject) -> list[_Change]:
    """The flags of a module or function: one flag in each call."""
    reading = subject.reading
    used = {*reading.names, reading.causal_flag, *(mask.argument for mask in reading.masks)}
    cache = reading.cache
    used |= set() if cache is None else {cache.flag, cache.argument}
    flags = [
        argument
        for argument in arguments_of(subject.target)
        if isinstance(argument.default, bool)
        and argument.role not in (*_OTHERS, "use_cache")
        and not argument.by_place
        and argument.name not in used
    ]
    return [_turned(parameter, reading.constants.get(parameter.name, parameter.default), "flag") for parameter in flags]


def _whole_flags(subject: Subject) -> list[_Change]:
    """The flags of a whole model: each flag is a kind of change."""
    model = subject.target.model if isinstance(subject.target, EncoderDecoderModel) else subject.target
    flags = {
        argument.name: argument
        for argument in arguments_of(model)
        if not argument.by_place and argument.role not in _OTHERS
    }
    if is_transformers(model):
        kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
        if inspect.Parameter.VAR_KEYWORD in kinds:
            flags = {name: TargetArgument(name) for name in _RETURNED if name != "use_cache"} | flags
    values = {name: subject.reading.constants.get(name, parameter.default) for name, parameter in flags.items()}
    values |= {name: not other for name, other in _RETURNED.items() if name in flags and values[name] is None}
    return [_turned(flag, values[name], name) for name, flag in flags.items() if isinstance(values[name], bool)]


def _turned(flag: TargetArgument, value: bool, kind: str) -> _Change:
    harmless = flag.role in ("weights_flag", "averaged", "gqa", "use_cache")
    harmless |= bool(re.fullmatch(_HARMLESS, flag.name.lower()))
    return _Change(f"{flag.name}={not value}", kind, {flag.name: not value}, harmless=harmless)


def _constants(reading: Reading, changes: tuple[_Change, ...]) -> dict[str, Any]:
    return {**reading.constants, **{name: value for change in changes for name, value in change.constants.items()}}


def _taken(plain: Subject, changes: tuple[_Change, ...], situation: _Situation, before: Tensor) -> Reading | None:
    """The reading of the call; None if no such call gives an output of the same shape as `before`."""
    reading = replace(plain.reading, constants=_constants(plain.reading, changes))
    mask = next((change.mask for change in changes if change.mask is not None), None)
    if mask is not None:
        others = [other for other in reading.masks if other.argument != mask.argument]
        reading = replace(reading, masks=(replace(mask, required=True), *others))
    places: list[tuple[Any, Any]] = [(reading.out, reading.weights)]
    places += [(reading.out, None), (None, None), (0, None)] if any(change.constants for change in changes) else []
    for out, weights in dict.fromkeys(places):
        other = replace(reading, out=out, weights=weights)
        after = situation.output(replace(plain, reading=other))
        if after is not None and after.shape == before.shape:
            return other
    return None


# How far they are apart


def _situations(plain: Subject, causal: bool | None) -> Iterator[_Situation]:
    """The situations of the checks: several lengths, padding, a mask by pair, train mode."""
    longest = plain.reading.max_length or max(_LENGTHS)
    for length in _WHOLE_LENGTHS if plain.form == "tokens" else _LENGTHS:
        if length <= longest:
            yield _Situation(f"of {length} positions", _inputs(plain, 2, length))
    length = min(_PADDED, longest)
    inputs = _inputs(plain, 3, length)
    behind = torch.arange(length) < torch.tensor([length, max(length - 4, 1), max(length - 9, 1)])[:, None]
    for words, real in (("behind", behind), ("in front", behind.flip(1))):
        # In front only of whole models, whose positions are counted: modules compose masks where a row sees no key.
        in_front = causal and plain.form == "tokens"
        if inputs.key_length == length and plain.reading.masks and (words == "behind" or in_front):
            yield _Situation(f"of {length} positions with padding {words}", inputs, {"padding": real})
    if plain.takes("Q"):
        drawn = torch.rand(length, length, generator=torch.Generator().manual_seed(0)) < 0.6
        pairs = {"pairs": drawn | torch.eye(length, dtype=torch.bool)}
        yield _Situation(f"of {length} positions under a mask by pair", inputs, pairs)
    trained = _Situation(f"of {length} positions in train mode without dropout", inputs, training=True)
    if plain.module is not None and _is_settled(plain, trained):
        yield trained


def _inputs(plain: Subject, batch: int, length: int) -> NamedInputs:
    return plain.inputs(batch, length, dtype=None if plain.form == "tokens" else plain.dtype)


def _is_settled(plain: Subject, trained: _Situation) -> bool:
    """Whether nothing is drawn in train mode: paths that draw in another order may compute the same."""
    with plain.training():
        outs = [steady(plain, trained.inputs, seed=seed).out for seed in (0, 1)]
    return torch.equal(*outs)


def _apart(other: Subject, before: list[tuple[_Situation, Tensor]]) -> tuple[float, float, str]:
    """(the largest difference beyond rounding, the size of the outputs there, its position)."""
    worst = (0.0, 0.0, "")
    for situation, out in before:
        after = situation.output(other)
        if after is None or after.shape != out.shape:  # it takes no such inputs
            continue
        gap = (after.double() - out.double()).abs().nan_to_num(nan=torch.inf)
        by = float(gap.max())
        if by > max(_allowed(other, situation.inputs, out), worst[0]):
            at = [int(index) for index in torch.unravel_index(gap.argmax(), gap.shape)]
            worst = (by, float(out.abs().max()), f"at output {at[-2]} of item {at[0]}, {situation.words}")
    return worst


def _allowed(subject: Subject, inputs: NamedInputs, out: Tensor) -> float:
    if subject.form != "tokens":
        return tolerance(subject, inputs, out)
    return float(out.abs().max()) * (_APART_WHOLE if out.dtype == torch.float64 else 100 * _APART_WHOLE)
