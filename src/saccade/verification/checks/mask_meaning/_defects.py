"""Ways to misuse a mask argument: the other mask that explains the dependence of outputs on inputs.

Shape legend: B batch, H heads (1 for modules, whose heads are merged), Lq / Lk lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...findings._finding import Location, Severity
from ...subject import _influence as influence
from ...subject._inputs import NamedInputs
from ...subject._reading import MaskReading
from ...subject._subject import Subject
from ...tracing._mask_code import MaskCode, mask_code
from ...tracing._trace import TracedAttention, TraceStep
from ...tracing._visible import attends, attentions_of, masking_line, steps_of

INVERTED = "The polarity is inverted"
_FINITE = -1.5  # a bias that changes weights and hides nothing
_REPEATING = ("repeat", "repeat_interleave", "expand", "tile", "broadcast_to", "cat")


@dataclass(frozen=True, eq=False)
class MaskArgumentProbe:
    """Which inputs each output depends on when one mask argument is given random masks."""

    subject: Subject  # with this argument as its only one
    mask: MaskReading
    inputs: NamedInputs
    given: Tensor  # (B or 1, H or 1, Lq or 1, Lk) True = attend, as it varies along the argument's axes
    own: Tensor  # (B, H', Lq, Lk) what outputs depend on without the mask; H' = 1 for modules
    visible: Tensor  # (B, H', Lq, Lk) and with it
    known: Tensor  # (Lq, Lk) pairs of which the dependence is known: not a position on itself, in one sequence
    weights: Tensor | None = None  # (B, H, Lq, Lk) where `visible` is read from them
    normalised: str = "unknown"  # the axis of their softmax

    def expected(self, given: Tensor) -> Tensor:
        """The dependence of outputs on inputs if the mask means `given`; for a module over all heads, as `visible`."""
        if self.visible.shape[1] == 1 and given.shape[1] > 1:
            given = given.any(1, keepdim=True)
        return given.expand(self.visible.shape) & self.own

    @property
    def asked(self) -> Tensor:
        """The query rows to check, (B or 1, 1, Lq or 1, 1): outputs at padding itself may be anything, zeros too."""
        if self.mask.by_pair or self.subject.form not in ("self", "tokens"):
            return torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return self.given[:, :1, :1].mT

    def fits(self, given: Tensor) -> bool:
        """Whether the visible keys are those of the mask `given`. Queries whose keys are all hidden are not
        compared."""
        wanted = self.expected(given)
        full = wanted.any(-1, keepdim=True) & self.known & self.asked
        return bool(((self.visible == wanted) | ~full).all()) and bool((wanted & full).any())


@dataclass(frozen=True)
class MaskDefect:
    words: str
    fix: str = ""  # "": hide keys by this mask, as `mask_code` writes it
    severity: Severity = "error"


def masks_of(mask: MaskReading, given: Tensor, inputs: NamedInputs) -> dict[str, Any]:
    """The mask as keyword arguments of `Subject.__call__`."""
    if mask.by_pair:
        return {"pairs": given}
    return {"padding": given[:, 0, 0].expand(inputs.batch, -1)}


def with_fix(probe: MaskArgumentProbe, defect: MaskDefect) -> MaskDefect:
    """The defect with a fix: its own, or the line that hides keys."""
    return replace(defect, fix=defect.fix or code_of(probe).hiding)


def code_of(probe: MaskArgumentProbe) -> MaskCode:
    """The code that uses the mask."""
    return mask_code(probe.mask, _steps(probe), probe.inputs)


def _steps(probe: MaskArgumentProbe) -> tuple[TraceStep, ...]:
    return steps_of(probe.subject, probe.inputs, **masks_of(probe.mask, probe.given, probe.inputs))


def line_of(probe: MaskArgumentProbe, defect: MaskDefect) -> Location | None:
    """The line where the mask is applied; for mixed items or heads, where it is repeated."""
    steps = _steps(probe)
    if "repeat" in defect.fix:
        lines = [step.location for step in steps if step.name in _REPEATING and step.location is not None]
        own = [line for line in lines if str(probe.mask.argument) in line.code or "mask" in line.code]
        if own:
            return own[0]
    return masking_line(steps, probe.inputs, argument=str(probe.mask.argument))


def inside(probe: MaskArgumentProbe) -> MaskArgumentProbe | None:
    """The same probe, read from the attention weights of each head."""
    attentions = _weights(probe)
    if attentions is None or attentions[0].weights.shape[0] != probe.visible.shape[0]:
        return None
    before, after = (attends(attention).cpu() for attention in attentions)
    # under an inverted polarity showing everything hides all, which is NaN, or 0 in a kernel: outputs then tell what
    # there is to see
    own = before if before.any() else torch.ones_like(before)
    if attentions[0].weights.isnan().any() or not before.any():
        own = own & (probe.own | ~probe.known)
    return replace(
        probe,
        own=own,
        visible=after,
        known=torch.ones_like(probe.known),
        weights=attentions[1].weights.cpu(),
        normalised=attentions[1].normalised,
    )


def sums_to_one(inner: MaskArgumentProbe) -> bool:
    assert inner.weights is not None
    rows = inner.expected(inner.given).any(-1)
    return bool((inner.weights.double().sum(-1)[rows] > 0.99).all())


def named(probe: MaskArgumentProbe) -> MaskDefect:
    """The other mask that explains the visible keys."""
    given, mask = probe.given, probe.mask
    if probe.fits(~given):
        return _inverted(mask)
    if probe.fits(torch.ones_like(given)):
        return _unhidden(probe)
    square = given.shape[-1] == given.shape[-2]
    if square and probe.fits(given.mT):
        return MaskDefect(
            "The mask is applied transposed: its rows and columns, queries and keys, are swapped.",
            "scores.masked_fill(~mask, ...) with scores of shape (B, H, Lq, Lk)",
        )
    return _mixed(probe) or MaskDefect(
        f"The visible pairs fit no reading of `{mask.argument}`: {int((probe.own & ~probe.visible).sum())} pairs are "
        f"hidden, and the mask says {int((probe.own & ~probe.expected(given)).sum())}."
    )


def _inverted(mask: MaskReading) -> MaskDefect:
    said = f'its documentation ("{mask.words}")' if mask.words else "its promise"
    means = {"attend": "True = attend", "ignore": "True = ignore", "additive": "-inf = ignore"}[mask.meaning]
    return MaskDefect(f"{INVERTED}: {said} says {means}, and it does the opposite.")


def _mixed(probe: MaskArgumentProbe) -> MaskDefect | None:
    """Masks of one item or head applied to another."""
    given = probe.given
    for axis, what, fix in ((0, "batch item", "mask[:, None]"), (1, "head", "mask[:, None] of shape (B, 1, Lq, Lk)")):
        count = given.shape[axis]
        if count < 2:
            continue
        for index in range(count):
            if probe.fits(given.narrow(axis, index, 1).expand(given.shape)):
                return MaskDefect(
                    f"The mask of {what} {index} is applied to every {what}.", f"{fix}  # its own for each {what}"
                )
        for step in range(1, count):
            if probe.fits(given.roll(step, axis)):
                return MaskDefect(
                    f"The mask of another {what} is applied: {what} {step} has that of {what} 0.",
                    f"{fix}  # heads and items in the order of the scores",
                )
    heads, items = probe.visible.shape[1], given.shape[0]
    if given.shape[1] == 1 and items > 1 and heads > 1:
        order = torch.arange(items * heads)
        tiled = given[:, 0][order % items].view(items, heads, *given.shape[2:])
        turned = given[:, 0][(order // heads)].view(heads, items, *given.shape[2:]).transpose(0, 1)
        if probe.fits(turned):
            return MaskDefect(
                "Masks of items are repeated over the heads in the wrong order: (B, H) for scores of (H, B).",
                "mask.repeat(num_heads, 1, 1)  # not mask.repeat_interleave(num_heads, dim=0)",
            )
        if probe.fits(tiled):
            return MaskDefect(
                "Masks of items are repeated over the heads in the wrong order: (H, B) for scores of (B, H).",
                "mask.repeat_interleave(num_heads, dim=0)  # not mask.repeat(num_heads, 1, 1)",
            )
    return None


def _unhidden(probe: MaskArgumentProbe) -> MaskDefect:
    """Why a mask hides no key."""
    attentions = _weights(probe)
    if not probe.mask.by_pair and _hides_queries(probe):
        words = "It is broadcast along the wrong axis: it hides queries where it should hide keys."
        if attentions is not None and attentions[1].zeroed is not None:
            words += " And it is multiplied into the scores, where exp(0) is 1: it would hide no key either."
        return MaskDefect(words)
    if attentions is not None:
        before, after = attentions
        defect = _by_weights(before, after, probe.given)
        if defect is not None:
            return defect
    if bool(_change(probe).any()):
        return MaskDefect("The mask changes the output and hides nothing: hidden keys keep a weight.")
    name = probe.mask.argument
    return MaskDefect(
        f"`{name}` hides nothing: it is not used.",
        f"# hand `{name}` on to where scores are made: {code_of(probe).hiding}",
    )


def _change(probe: MaskArgumentProbe) -> Tensor:
    """(B, H', Lq) how much the mask changes each output."""
    called = influence.steady(probe.subject, probe.inputs)
    open_ = masks_of(probe.mask, torch.ones_like(probe.given), probe.inputs)
    masks = masks_of(probe.mask, probe.given, probe.inputs)
    sizes = influence.difference(called(probe.inputs, **open_), called(probe.inputs, **masks)).cpu()
    return sizes.masked_fill(sizes <= called.noise, 0.0)


def _hides_queries(probe: MaskArgumentProbe) -> bool:
    """Whether a mask of keys changes the outputs at exactly the hidden positions."""
    if probe.inputs.length != probe.inputs.key_length:
        return False
    rows = (_change(probe) > 0).any(1)
    return rows.equal(~probe.given[:, 0, 0].expand(rows.shape))


def _weights(probe: MaskArgumentProbe) -> tuple[TracedAttention, TracedAttention] | None:
    """The attention that the mask goes to, without and with it."""
    open_ = masks_of(probe.mask, torch.ones_like(probe.given), probe.inputs)
    masks = masks_of(probe.mask, probe.given, probe.inputs)
    before, after = (attentions_of(probe.subject, probe.inputs, **each) for each in (open_, masks))
    shape = (probe.inputs.length, probe.inputs.key_length)
    for attention, other in zip(before, after, strict=False):
        same = attention.weights.shape == other.weights.shape and attention.weights.shape[-2:] == shape
        if same and not attention.weights.equal(other.weights):
            return attention, other
    return None


def counted(probe: MaskArgumentProbe) -> float | None:
    """The factor by which a finite value of an additive mask enters the scores; None if it cannot be measured."""
    mask = replace(probe.mask, fill=_FINITE)
    reading = replace(probe.subject.reading, masks=(mask,))
    attentions = _weights(replace(probe, mask=mask, subject=replace(probe.subject, reading=reading)))
    if attentions is None:
        return None
    change = (attentions[1].weights.double() / attentions[0].weights.double()).log().cpu()
    hidden = ~probe.given.expand(change.shape)
    rows = (hidden.any(-1) & (~hidden).any(-1)).unsqueeze(-1)
    if not bool(change.masked_fill(~rows, 0.0).isfinite().all()):
        return None
    lowered, kept = (change.masked_fill(~which, torch.nan).nanmean(-1)[rows[..., 0]] for which in (hidden, ~hidden))
    return float((lowered - kept).mean() / _FINITE)


def as_number(probe: MaskArgumentProbe) -> float | None:
    """How much more a True than a False adds to the scores if a boolean mask is added as 1 and 0; None if booleans
    raise an error, hide something, or do nothing."""
    mask = replace(probe.mask, meaning="attend", dtype="bool")
    reading = replace(probe.subject.reading, masks=(mask,))
    attentions = _weights(replace(probe, mask=mask, subject=replace(probe.subject, reading=reading)))
    if attentions is None or not bool((attentions[1].weights > 0).all()):
        return None
    change = (attentions[1].weights.double() / attentions[0].weights.double()).log().cpu()
    shown = probe.given.cpu().expand(change.shape)
    rows = shown.any(-1) & (~shown).any(-1)
    counts = [change.masked_fill(~which, torch.nan).nanmean(-1)[rows] for which in (shown, ~shown)]
    steps = counts[0] - counts[1]
    if not len(steps) or not bool(((steps - steps[0]).abs() < 1e-3).all()) or abs(float(steps[0])) < 1e-2:
        return None
    return float(steps[0])


def _by_weights(before: TracedAttention, after: TracedAttention, given: Tensor) -> MaskDefect | None:
    first, second = before.weights.double(), after.weights.double()
    shown = given.to(first.device).expand(first.shape)
    if bool(torch.isclose(second, first * shown, rtol=1e-4, atol=1e-6).all()):
        return MaskDefect(
            "Hidden weights are set to 0 after the softmax, whose sum has counted them: rows no longer sum to 1, and "
            "outputs still depend on what is hidden."
        )
    hidden_alone = ~shown & (first > 0)  # and not by another mask of the target's own
    hidden = second.masked_fill(~hidden_alone, torch.nan)
    low, high = hidden.nan_to_num(torch.inf).amin(-1), hidden.nan_to_num(-torch.inf).amax(-1)
    several = hidden_alone.sum(-1) > 1
    alike = ((high - low).abs() <= 1e-5 * high.abs()) & (high > 0)
    if bool(several.any()) and bool(alike[several].all()):
        return _constant(after, hidden_alone)
    ratio = (second / first).masked_fill(~hidden_alone, torch.nan)
    if not bool((ratio.nan_to_num(0.0) < 1).all()):
        return None
    kept = float(ratio.nanmean())
    return MaskDefect(
        f"Hidden keys keep {kept:.3g} of their weight: what is added to their scores is too small to hide them."
    )


def _constant(after: TracedAttention, alone: Tensor) -> MaskDefect:
    hidden = None if after.logits is None else after.logits.double()[alone.expand(after.logits.shape)]
    zero = None if hidden is None else float(hidden.median())
    if zero is None or abs(zero) < 1e-6:
        return MaskDefect(
            "Hidden scores are 0 instead of -inf: the mask is multiplied into the scores, or they are filled with 0. "
            "exp(0) is 1, so hidden keys keep their weight."
        )
    if zero < -1e4:
        words = f"Hidden scores are {zero:.3g}, and keep weight: it is the softmax that is at fault."
        return MaskDefect(words, "weights = scores.softmax(dim=-1)", "note")
    return MaskDefect(f"Hidden scores are set to {zero:.3g} instead of -inf, which is too small a number to hide them.")
