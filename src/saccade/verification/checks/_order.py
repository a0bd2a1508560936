"""Whether the order of the input matters, compared with the author's promise.

Shape legend: B batch, H heads, L length; rotations: as the rotated tensors, tables as they were broadcast to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from ..findings._finding import Finding, Inapplicable, Location, TargetError, Unmeasured
from ..subject._check import Check
from ..subject._influence import direction, is_causal
from ..subject._inputs import NamedInputs, Side
from ..subject._source import thrown_away
from ..subject._steady import exact, steady, tolerance
from ..subject._subject import Subject
from ..tracing._mode import ElementwiseFactor
from ..tracing._positions import positions
from ..tracing._shadow import UNKNOWN, varying
from ..tracing._trace import traced
from ..tracing._units import TokenOwners
from ..tracing._visible import line_over_sequence, steps_of

_NAME = "order"
_error = partial(Finding, _NAME, _NAME, "error")
_note = partial(Finding, _NAME, _NAME, "note")
_LENGTH = 7
_LONG = 33
_TABLE = re.compile(r"(^|[._])(w?pos|positions?|positional)[_.]?(emb|enc|table|\.|$)|(^|\.)wpe\.", re.IGNORECASE)
_ORDER = (4, 0, 6, 2, 5, 1, 3)  # no position stays, neighbours part
_BEFORE_LAST = (4, 0, 2, 5, 1, 3, 6)
_SAME = 1e-3  # relative; tables in float32 are right to 1e-6
_BAG_OF_WORDS = 'The model sees a bag of words: "dog bites man" and "man bites dog" give the same result.'


def _run(subject: Subject) -> Iterator[Finding]:
    plain = exact(subject)
    inputs = plain.inputs(2, _LENGTH)
    once, again = (steady(plain, inputs, seed=seed).out for seed in (0, 1))
    if once.isfinite().all() and not torch.equal(once, again):
        raise Unmeasured("its outputs are random, so those of another order cannot be compared")
    turned = [*_wrong_rotations(plain), *_wrong_products(plain)]
    yield from turned
    if turned:
        return
    if subject.form in ("cross", "qkv", "attention"):
        if subject.form != "cross" and is_causal(plain):
            yield from _findings_of(plain, _moved(plain, _BEFORE_LAST, "key", last=True))
        else:
            yield from _findings_of(plain, _moved(plain, _ORDER, "key"))
        return
    way = direction(subject)
    if way == "neither":
        raise Unmeasured("some outputs see later inputs and some do not, see causal-leak and causal-blindness")
    if way == "causal":
        yield from _findings_of(subject, _moved(plain, _BEFORE_LAST, last=True))
    else:
        yield from _findings_of(subject, _moved(plain, _ORDER))
        yield from _late_positions(plain)


def _wrong_rotations(subject: Subject) -> Iterator[Finding]:
    """Rotations by angles that do not depend on positions: queries and keys turn alike, and scores stay the same."""
    rotations = _rotations(subject, subject.one_sequence(subject.inputs(2, _LENGTH)))
    if any(rotation.by_position for rotation in rotations) or not any(rotation.otherwise for rotation in rotations):
        return
    yield _error(
        "Queries and keys are rotated by angles that differ between heads or batch items, not between positions: the "
        "rotation runs along another axis than the sequence.",
        "Queries and keys of a head are turned by one angle, which leaves their products as they were: the model sees "
        "a bag of words.",
        "cos, sin = cos[None, None], sin[None, None]  # (1, 1, L, D) for q, k of (B, H, L, D); L = q.shape[-2]",
        {"rotations": len(rotations)},
        rotations[0].location,
    )


def _wrong_products(subject: Subject) -> Iterator[Finding]:
    """Findings about rotations after which q·k does not depend on the distance only (Su et al. 2021, RoFormer, equation
    11): cosines and sines of other pairs of features, or keys that rotate in the opposite direction.

    All inputs are the same token. If the values are then equal too, only the rotations depend on positions, and the
    products must be equal along each diagonal. Queries are also tried at unit length, for a temperature per query.
    """
    if subject.form == "cross":
        return
    inputs = subject.one_sequence(subject.inputs(2, _LENGTH)).permuted([0] * _LENGTH)
    looked = traced(subject, inputs)
    rotating = list(_rotating(looked.factors))
    if looked.tokens is None or not rotating or not all(_is_even(factor, looked.tokens) for factor in rotating):
        return  # none; or of places in an image: no function of one distance
    for attention in looked.attentions:
        if (
            attention.value is None
            or attention.query.shape[-2] != attention.key.shape[-2]
            or _spread(attention.value.mT) > _SAME
        ):
            continue
        query, key = attention.query.detach().double(), attention.key.detach().double()
        off = min(_off_diagonals(rotated @ key.mT) for rotated in (query, query / query.norm(dim=-1, keepdim=True)))
        if off > _SAME:
            yield _error(
                f"The product of a rotated query and a rotated key depends on their places, not on their distance "
                f"alone: with the same input everywhere it differs by {off:.0%} between pairs of one distance.",
                "What is learned at one place of a text does not apply at another.",
                "q, k = (x * cos + rotate_half(x) * sin for x in (q, k))  # cos, sin = (angles.cat(angles)).cos(), "
                ".sin(): halves with halves, neighbours with neighbours, one direction for both",
                {"off": off},
                rotating[0].location,
            )
            return


def _off_diagonals(products: Tensor) -> float:
    """The largest difference along a diagonal of (B, H, L, L), relative to the largest entry."""
    length = products.shape[-1]
    return max(_spread(products.diagonal(n, -2, -1), products) for n in range(1 - length, length))


def _spread(numbers: Tensor, beside: Tensor | None = None) -> float:
    """The largest range of numbers along the last axis, relative to the largest number (of `beside`, if given)."""
    apart = (numbers.amax(-1) - numbers.amin(-1)).max()
    return float(apart / (numbers if beside is None else beside).abs().max().clamp_min(1e-30))


def _is_even(factor: ElementwiseFactor, tokens: TokenOwners) -> bool:
    """Whether the angles grow by the same from each position to the next: n(p + 1) + n(p - 1) = 2 cos(step) n(p)."""
    positions = _positions(factor, tokens)
    along = [] if positions is None else [axis for axis in range(positions.dim() - 1) if varying(positions, axis)]
    if len(along) != 1 or factor.numbers.shape[along[0]] != _LENGTH:
        return False
    numbers = factor.numbers.detach().movedim(along[0], -1).to(torch.complex128)
    here, around = numbers[..., 1:-1], numbers[..., 2:] + numbers[..., :-2]
    steps = (here.conj() * around).sum(-1, keepdim=True) / here.abs().square().sum(-1, keepdim=True).clamp_min(1e-30)
    return float((around - steps * here).abs().max()) < _SAME


def _moved(subject: Subject, order: Sequence[int], side: Side = "both", *, last: bool = False) -> float:
    """Difference of outputs of permuted inputs from permuted outputs, in units of the tolerance. With side="key"
    outputs keep their order. `last`: only the last output."""
    inputs = subject.inputs(2, len(order))
    out, permuted = (steady(subject, given).out for given in (inputs, inputs.permuted(order, side)))
    wanted = out
    if last:
        wanted, permuted = out[..., -1, :], permuted[..., -1, :]
    elif side == "both":
        if out.shape[-2] != inputs.length:
            raise Inapplicable("its outputs are not one for each input")
        wanted = out[..., list(order), :]
    if permuted.shape != wanted.shape:
        raise Unmeasured("its outputs change their shape when the inputs are permuted")
    if not torch.isfinite(wanted).all():
        raise Unmeasured("its outputs are not finite")
    return float((permuted - wanted).abs().max()) / tolerance(subject, inputs, out)


def _late_positions(subject: Subject) -> Iterator[Finding]:
    """Positions that count at the start of a long input and no longer at its end, as where their number is clamped."""
    length = min(_LONG, subject.reading.max_length or _LONG)
    if length < 2 * _LENGTH:
        return
    swaps = ([1, 0, *range(2, length)], [*range(length - 2), length - 1, length - 2])
    try:
        first, last = (_moved(subject, order) for order in swaps)
    except TargetError:
        return  # a limit of its length, which robustness tells
    if first <= 1 or last > 1:
        return
    yield _error(
        f"Swapping inputs {length - 2} and {length - 1} of {length} swaps their outputs and changes nothing else, "
        "while swapping inputs 0 and 1 does: all late positions are treated as the same one.",
        "In long texts, the order of the later part is lost without an error.",
        "x = x + self.positions(torch.arange(L))  # a table that is long enough, and no clamp",
        {"length": length, "at the start": first, "at the end": last},
        traced(subject, subject.inputs(2, length)).line("clamp", "clip", "clamp_max", "minimum", "remainder"),
    )


def _findings_of(subject: Subject, ratio: float) -> Iterator[Finding]:
    """Findings about order. `ratio`: the distance of outputs of a permuted input from permuted outputs, relative to
    rounding."""
    knows, promised = ratio > 1, subject.promise.positions
    if promised is None and not knows and (table := _table(subject)) is not None:
        yield _error(
            f"It has positions, `{table}`, and they have no effect: inputs in another order give the same outputs"
            + (" for what comes after them." if is_causal(subject) else " in that order."),
            _BAG_OF_WORDS,
            "x = x + self.positions(torch.arange(L, device=x.device))  # another row for each place, before attention",
            {"ratio": ratio, "table": table},
            _line_of_loss(subject),
        )
        return
    if promised is None or promised == knows:
        if promised is None:
            yield _what_it_knows(knows, causal=is_causal(subject) and subject.form != "cross")
        return
    if knows:
        yield _error(
            "Inputs in another order do not give the same outputs in that order, although it is declared "
            "to have no positions.",
            "What is learned at one position does not apply at another.",
            "Remove what depends on the place: index arithmetic, biases by position, a reshape that mixes positions.",
            {"ratio": ratio},
            _line_of_use(subject),
        )
    else:
        yield _error(
            "Inputs in another order give the same outputs in that order: positions have no effect, although it "
            "is declared to use them.",
            _BAG_OF_WORDS,
            "Add positions to the input, x = x + self.positions(torch.arange(L)), or rotate both queries and keys.",
            {"ratio": ratio},
            _line_of_loss(subject),
        )


def _line_of_use(subject: Subject) -> Location | None:
    """The line where positions are combined with the input, or where the input is rotated along the sequence."""
    inputs = subject.one_sequence(subject.inputs(2, _LENGTH, _LENGTH + 4 if subject.form == "cross" else None))
    used = positions(subject, inputs).used
    return used[0] if used else line_over_sequence(steps_of(subject, inputs), _LENGTH)


def _line_of_loss(subject: Subject) -> Location | None:
    """The line where positions are dropped or become equal; otherwise where they are used or made."""
    lines_of = positions(subject, subject.one_sequence(subject.inputs(2, _LENGTH)))
    last = [lines[-1] for lines in (lines_of.used, lines_of.made) if lines]
    return thrown_away(subject) or next(iter([*lines_of.lost, *last]), None)


def _table(subject: Subject) -> str | None:
    """A learned table of positions that the target declares."""
    if subject.module is None or subject.form != "self":
        return None
    named = (name for name, tensor in subject.module.named_parameters() if tensor.dim() >= 2)
    return next((name.removesuffix(".weight") for name in named if _TABLE.search(name)), None)


def _what_it_knows(knows: bool, *, causal: bool) -> Finding:
    if knows:
        return _note("It uses the order of its input: permuted inputs give different outputs.")
    if causal:
        return _note(
            "It has no positions of its own: the last output is the same whatever the order of the inputs before it.",
            "A model made of it needs positions from elsewhere, or many layers to learn them from the causal mask.",
        )
    return _note(
        "It does not use the order of its input (permuted inputs give permuted outputs), as attention by itself does "
        "not.",
        "A model made of it needs positions from elsewhere.",
    )


# Rotations of queries and keys: the axis that their angles follow


@dataclass(frozen=True)
class _RotatedRows:
    """Rows that are multiplied by cosines and sines, or by complex numbers of size 1."""

    by_position: bool  # whether the angles differ between positions
    otherwise: bool  # whether they differ along another axis, that of the heads or of the batch
    location: Location | None


def _rotations(subject: Subject, inputs: NamedInputs) -> tuple[_RotatedRows, ...]:
    """Rotations of one call with angles other than 0 and known positions."""
    looked = traced(subject, inputs)
    assert looked.tokens is not None
    known = [(factor, _positions(factor, looked.tokens)) for factor in _rotating(looked.factors)]
    return tuple(_rotation(factor, positions) for factor, positions in known if positions is not None)


def _rotating(factors: tuple[ElementwiseFactor, ...]) -> Iterator[ElementwiseFactor]:
    """Factors that rotate: complex numbers of size 1, and cosines for which there are sines."""
    for factor in factors:
        if factor.numbers.is_complex() and _is_one(factor.numbers.abs()) and not _is_trivial(factor.numbers.imag):
            yield factor
    real = [factor for factor in factors if factor.numbers.is_floating_point() and not _is_trivial(factor.numbers)]
    for factor, other in permutations(real, 2):
        fits = factor.numbers.shape == other.numbers.shape
        if fits and _is_one(factor.numbers.double() ** 2 + other.numbers.double() ** 2):
            yield factor


def _is_one(numbers: Tensor) -> bool:
    return bool(((numbers - 1).abs() < 1e-2).all())


def _is_trivial(numbers: Tensor) -> bool:
    """Whether all numbers are 0, 1 or -1, as in a mask and its opposite."""
    return bool(((numbers == 0) | (numbers.abs() == 1)).all())


def _rotation(factor: ElementwiseFactor, positions: Tensor) -> _RotatedRows:
    axes = range(factor.numbers.dim() - 1)
    along = [axis for axis in axes if varying(positions, axis)]
    turned = [axis for axis in axes if varying(factor.numbers, axis)]
    return _RotatedRows(bool(set(along) & set(turned)), bool(set(turned) - set(along)), factor.location)


def _positions(factor: ElementwiseFactor, tokens: TokenOwners) -> Tensor | None:
    """The position of each row, None if it is not known."""
    known = bool((factor.tokens != UNKNOWN).all()) and factor.tokens.shape == factor.numbers.shape
    positions = tokens.position[factor.tokens] if known else torch.zeros(0)
    return positions if known and bool((positions != positions.flatten()[0]).any()) else None


CHECK = Check(
    _NAME,
    _NAME,
    "The order of the input matters if positions are added, and only then.",
    "Inputs are put in another order, and the outputs compared with the old ones in that order (of a causal target: "
    "its last output, with the earlier inputs in another order); of a long input, the first two and the last two are "
    "swapped.",
    "Without positions a sentence is a bag of words; with positions that are not meant to be there, tokens are mixed.",
    _run,
)
