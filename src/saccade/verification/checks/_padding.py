"""Whether the content or the length of padding changes outputs of real positions.

Shape legend: B batch, H heads (1 for modules), L / Lk lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...support._numbers import rounded
from ...support._restored import seeded
from ..findings._finding import Finding, Inapplicable, Location, TargetError
from ..subject import _influence as influence
from ..subject._check import Check
from ..subject._inputs import NamedInputs, Side
from ..subject._reading import MaskReading
from ..subject._subject import Subject
from ..subject._words import no_mask
from ..tracing._mask_code import MaskCode, mask_code
from ..tracing._trace import TracedAttention
from ..tracing._visible import attentions_of, line_over_sequence, masking_line, steps_of
from ._fills import averages_all, averaging

_LENGTHS = (7, 4, 5)  # real positions of each batch item; the first has no padding
_PADDED = 7
_LONGER = 5
_EFFECT = (
    "The result for a sentence depends on the others in its batch and on the padded length: results change with the "
    "batch size, and tests on single sentences do not show it."
)
_HIDE = ""  # the fix that hides keys by the mask, as `mask_code` writes it
_APART = "Compute each batch item from its own inputs."


@dataclass(frozen=True, eq=False)
class _PaddedSubject:
    """A subject, inputs with padded positions, and the masks that mark them."""

    subject: Subject
    inputs: NamedInputs
    real: Tensor  # (B, Lk)
    by_item: bool  # whether each item has padding of its own
    side: Side  # the side that is padded

    @property
    def masks(self) -> dict[str, Tensor]:
        if self.by_item:
            return {"padding": self.real}
        return {"pairs": self.real[0].expand(self.inputs.length, -1)}

    @property
    def mask(self) -> MaskReading:
        """The mask argument that marks the padding."""
        fitting = [mask for mask in self.subject.reading.masks if not self.by_item or "B" in mask.axes]
        return min(fitting, key=lambda mask: mask.by_pair == self.by_item)

    @property
    def code(self) -> MaskCode:
        return mask_code(self.mask, steps_of(self.subject, self.inputs, **self.masks), self.inputs)

    def rows(self, out: Tensor) -> list[tuple[int, Tensor]]:
        """Each item and its (H, n, D) outputs at real positions; all outputs if the padding is in the context."""
        length = out.shape[2]
        own = self.side == "both"
        keep = [self.real[item, :length] if own else torch.ones(length, dtype=torch.bool) for item in range(len(out))]
        return [(item, out[item][:, kept]) for item, kept in enumerate(keep)]


def _run(subject: Subject) -> Iterator[Finding]:
    """Findings about padding, of both sequences if there is a context."""
    parts = [part for part in (subject, subject.own_part) if part is not None and part.reading.masks] or [subject]
    reasons: list[Inapplicable] = []
    conventions: list[str] = []
    for part in parts:
        try:
            findings = [
                finding
                for finding in _findings_of(part)
                if finding.severity == "error" or finding.message not in conventions
            ]
        except Inapplicable as reason:
            reasons.append(reason)
            continue
        yield from findings
        conventions += [finding.message for finding in findings]
        if any(finding.severity == "error" for finding in findings):
            return  # the same masks are made of the same lines
    if len(reasons) == len(parts):
        raise reasons[0]


def _findings_of(subject: Subject) -> Iterator[Finding]:
    right = _padded(subject, [range(real, _PADDED) for real in _LENGTHS])
    base = _call(right)
    reported: list[object] = []  # of padding on the right, that on the left says the same
    for asked in (
        lambda: _contents(right, base),
        lambda: _left_padding(subject),
        lambda: _gradients(right),
        lambda: _more_padding(subject),
        lambda: _conventions(right, base, subject),
    ):
        findings = [finding for finding in asked() if (finding.severity, finding.evidence.keys()) not in reported]
        yield from findings
        reported += [(finding.severity, finding.evidence.keys()) for finding in findings]
        if any(finding.severity == "error" for finding in findings):
            return  # what else would be seen is of the same make


def _padded(subject: Subject, padding: Sequence[Sequence[int]], length: int = _PADDED) -> _PaddedSubject:
    """Inputs with these positions padded, by batch item.

    Raises:
        Inapplicable: no mask argument can mark padding.
    """
    if not subject.reading.masks:
        raise Inapplicable(f"{no_mask(subject)}, so padding cannot be marked")
    by_item = subject.takes("B")
    if not by_item:
        padding = [padding[1]] * len(padding)
    real = torch.ones(len(padding), length, dtype=torch.bool)
    for item, positions in enumerate(padding):
        real[item, list(positions)] = False
    if subject.form == "cross":
        inputs, side = subject.inputs(len(padding), length - 2, length), "key"
    else:
        inputs, side = subject.one_sequence(subject.inputs(len(padding), length)), "both"
    return _PaddedSubject(subject, inputs, real, by_item, side)  # type: ignore[arg-type]


def _call(padded: _PaddedSubject, inputs: NamedInputs | None = None) -> Tensor:
    inputs = padded.inputs if inputs is None else inputs
    with seeded(influence.SEED), torch.no_grad():
        return influence.four(padded.subject(inputs, **padded.masks).out)


def _contents(padded: _PaddedSubject, base: Tensor, where: str = "right") -> Iterator[Finding]:
    """Real outputs must not change with the contents of the padding: other random numbers, then large ones."""
    called = influence.steady(padded.subject, padded.inputs, **padded.masks)
    for words, factor in (("other random numbers", 1.0), ("numbers of size 10000", 1e4)):
        other = _refilled(padded, factor)
        sizes = influence.moved(called, padded.inputs, other, base, **padded.masks)
        for item, changed in padded.rows(sizes.unsqueeze(-1)):
            worst = float(changed.max()) if changed.numel() else 0.0
            if worst <= 16 * called.noise:
                continue
            real = int(padded.real[item].sum())
            row = _worst_row(padded, item, sizes)
            severity = "error" if factor == 1 else "warning"
            yield _finding(
                padded,
                severity,
                f"Output {row} of batch item {item} changes by {worst:.3g} when the {where} padding "
                f"of that item ({real} of {padded.real.shape[1]} positions are real) holds {words}.",
                _EFFECT,
                _HIDE,
                {"item": item, "output": row, "change": rounded(worst), "real": real},
            )
            return


def _worst_row(padded: _PaddedSubject, item: int, sizes: Tensor) -> int:
    by_row = sizes[item].amax(0)
    if padded.side == "both":
        by_row = by_row * padded.real[item, : len(by_row)]
    return int(by_row.argmax())


def _refilled(padded: _PaddedSubject, factor: float) -> NamedInputs:
    """Inputs with other random contents in all padding, times `factor`."""
    new = padded.inputs
    for item, real in enumerate(padded.real):
        positions = (~real).nonzero().flatten().tolist()
        if positions:
            new = new.changed(positions, padded.side, item=item)
    if factor == 1 or new.vocabulary:
        return new
    return _with_changed(padded, new, lambda tensor: tensor * factor)


def _with_changed(padded: _PaddedSubject, inputs: NamedInputs, change: Callable[[Tensor], Tensor]) -> NamedInputs:
    """Inputs with `change` applied to each padded position of the padded side."""

    def at_padding(tensor: Tensor) -> Tensor:
        where = ~padded.real if tensor.dim() == 3 else ~padded.real[:, None]
        return torch.where(where[..., None].to(tensor.device), change(tensor), tensor)

    return inputs.map(at_padding, inputs.on(padded.side))


def _left_padding(subject: Subject) -> Iterator[Finding]:
    """Findings about padding on the left, if a mask argument can mark it."""
    try:
        padded = _padded(subject, [range(_PADDED - real) for real in _LENGTHS])
        base = _call(padded)
        if any(rows.isnan().any() for _, rows in padded.rows(base)):
            return
        yield from _contents(padded, base, "left")
    except (Inapplicable, TargetError):
        return


def _more_padding(subject: Subject) -> Iterator[Finding]:
    """A sentence's outputs must not change with the amount of padding."""
    exact = subject if subject.form == "tokens" else influence.in_double(subject)
    real, outs = 4, []
    most = subject.reading.max_length
    totals = [total for total in (real, _PADDED, _PADDED + _LONGER) if most is None or total <= most]
    try:
        longest = _padded(exact, [range(real, max(totals))] * 2, max(totals))
        for total in totals:
            cut = longest.inputs.cut(slice(0, total), longest.side)
            shorter = replace(longest, inputs=cut, real=longest.real[:, :total])
            outs.append(_call(shorter)[:, :, :real] if shorter.side == "both" else _call(shorter))
    except TargetError:
        return  # which lengths and dtypes it takes is another promise
    for total, out in zip(totals[1:], outs[1:], strict=True):
        if out.shape != outs[0].shape:
            return  # it gives something for each key, as a pointer network does
        worst = float(influence.difference(outs[0], out).max())
        # Sums over a few more zeros, in another order: some tens of roundings; and what its own dtype does not resolve.
        # A softmax that is always float32 has two sums of `total` terms in its output, each off by total * eps / 2.
        inner = total * torch.finfo(torch.float32).eps
        eps = max(1e3 * torch.finfo(out.dtype).eps, torch.finfo(subject.dtype).eps, inner)
        allowed = eps * max(1.0, float(outs[0].abs().nan_to_num(0.0).max()))
        if worst > allowed and math.isfinite(worst):
            row = int(influence.difference(outs[0], out).amax((0, 1)).argmax())
            finding = _finding(
                longest,
                "error",
                f"Output {row} changes by {worst:.3g} when its {real} real positions are padded to "
                f"{total} instead of {real}.",
                _EFFECT,
                "Divide by the number of real positions, and normalise over "
                "the last axis alone; nothing may depend on the padded length.",
                {"output": row, "change": rounded(worst), "lengths": [real, total]},
            )
            yield replace(finding, location=_length_line(longest))
            return


def _length_line(padded: _PaddedSubject) -> Location | None:
    """The line where a length is computed: a mean along the sequence, else the scale."""
    line = line_over_sequence(steps_of(padded.subject, padded.inputs, **padded.masks), padded.inputs.key_length)
    scales = [
        attention.lines[kind]
        for attention in _attentions(padded)
        for kind in ("scale", "scores")
        if kind in attention.lines
    ]
    return line or (scales[0] if scales else None)


def _gradients(padded: _PaddedSubject) -> Iterator[Finding]:
    """Gradients of real outputs to padded inputs, which must be zero."""
    if padded.inputs.vocabulary:
        return
    for name, sizes in _sizes_of_gradients(padded).items():
        largest = float(sizes.max())
        largest_padded = (sizes * ~padded.real).max()
        if 0 < largest_padded <= influence.FAINT * largest:
            largest_padded = _without_rounding(padded, name, sizes).max()
        if largest_padded > 0:
            yield _finding(
                padded,
                "error",
                f"Real outputs have a gradient of {float(largest_padded):.3g} to `{name}` in the padding, "
                "though their values do not change with it.",
                "Training changes the embeddings of padding, and with them the model.",
                _HIDE,
                {"gradient": rounded(float(largest_padded)), "input": name},
            )
            return


def _without_rounding(padded: _PaddedSubject, name: str, sizes: Tensor) -> Tensor:
    """The sizes in the padding, 0 where they are rounding."""
    inputs = padded.inputs.to(torch.float64)
    exact = influence.exactly(
        padded.subject, lambda double: _sizes_of_gradients(replace(padded, subject=double, inputs=inputs))[name]
    )
    largest, length = float(sizes.max()), padded.real.shape[1]
    return influence.small_as_zero(sizes, exact, largest, padded.subject.dtype, length) * ~padded.real


def _sizes_of_gradients(padded: _PaddedSubject) -> dict[str, Tensor]:
    """(B, L) by input of the padded side: the largest gradient of the real outputs to each position."""
    leaves = padded.inputs.leaves()
    with torch.enable_grad(), seeded(influence.SEED):
        out = influence.four(padded.subject.fresh()(leaves, **padded.masks).out)
        weigh = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out)
        total = sum(
            (rows * kept).sum() for (_, rows), (_, kept) in zip(padded.rows(out), padded.rows(weigh), strict=True)
        )
        chosen = {name: leaves[name] for name in leaves.on(padded.side)}
        if not isinstance(total, Tensor) or not total.requires_grad:
            return {}
        gradients = torch.autograd.grad(total, list(chosen.values()), allow_unused=True)
    sizes = {
        name: tensor.abs().nan_to_num(0.0).cpu().double().amax(-1)
        for name, tensor in zip(chosen, gradients, strict=True)
        if tensor is not None
    }
    return {name: tensor if tensor.dim() == 2 else tensor.amax(1) for name, tensor in sizes.items()}


def _conventions(right: _PaddedSubject, base: Tensor, subject: Subject) -> list[Finding]:
    """Findings about NaN in the padding and about an item that is all padding. Two notes about these become one."""
    nan = list(_nan_inside(right, base))
    if any(finding.severity == "error" for finding in nan):
        return nan
    nothing = list(_all_padding(subject))
    if not nan or not nothing or nothing[0].severity == "error":
        return nothing or nan
    return [replace(nothing[0], message=f"{nothing[0].message} {_SPREADS}", effect=f"{nothing[0].effect} {_RARELY}")]


_SPREADS = "NaN in padding reaches the real outputs of its item, too: a weight of 0 times NaN is NaN."
_RARELY = "The latter matters only where padding may hold what was never written (torch.empty)."


def _nan_inside(padded: _PaddedSubject, base: Tensor) -> Iterator[Finding]:
    """Findings about NaN in the padding."""
    if padded.inputs.vocabulary:
        return
    out = _call(padded, _with_changed(padded, padded.inputs, lambda tensor: torch.full_like(tensor, torch.nan)))
    for item, rows in padded.rows(out):
        if rows.isnan().any() and not dict(padded.rows(base))[item].isnan().any():
            if bool(padded.real[item].all()):
                yield _finding(
                    padded,
                    "error",
                    f"NaN in the padding of other batch items reaches item {item}, which has none.",
                    "One bad sentence spoils all others of its batch.",
                    _APART,
                    {"item": item},
                )
            else:
                yield _finding(
                    padded,
                    "note",
                    f"NaN in the padding of batch item {item} makes its real outputs NaN: a weight of "
                    "0 times NaN is NaN. PyTorch's own attention does the same.",
                    _RARELY.replace("The latter", "It"),
                    f"value = value.masked_fill({padded.code.keys}, 0.0)",
                    {"item": item},
                )
            return


def _all_padding(subject: Subject) -> Iterator[Finding]:
    """Findings about a batch item that is all padding."""
    if not subject.takes("B"):
        return
    some = _padded(subject, [(), range(4, _PADDED), range(5, _PADDED)])
    none = _padded(subject, [(), range(_PADDED), range(5, _PADDED)])
    try:
        before, after = _call(some), _call(none)
    except TargetError as error:
        yield _finding(
            none,
            "warning",
            f"A batch item that is all padding raises {error.error}.",
            "A batch with empty items cannot be processed.",
            "Let it give zeros.",
            {"raised": error.error},
        )
        return
    for item in (0, 2):
        if after[item].isnan().any() and not before[item].isnan().any():
            yield _finding(
                none,
                "error",
                f"A batch item that is all padding makes batch item {item} NaN.",
                "One empty sentence spoils all others of its batch.",
                _APART,
                {"item": item},
            )
            return
    if after[1].isnan().any():
        yield _finding(
            none,
            "warning",
            "A batch item that is all padding gives NaN: its softmax is taken over nothing. PyTorch's "
            "own modules do the same.",
            "A loss that does not leave these outputs out is NaN, and one such item in "
            "training makes every parameter NaN.",
            f"weights = scores.softmax(-1).masked_fill({none.code.rows}, 0.0)",
            {"item": 1},
        )
        return
    empty = torch.zeros(3, none.inputs.length, dtype=torch.bool)
    empty[1] = True
    for attention in _attentions(none):
        if averages_all(attention, empty):
            yield averaging("padding", "A batch item that is all padding", attention)
            return


def _finding(
    padded: _PaddedSubject, severity: str, message: str, effect: str, fix: str, evidence: dict[str, object]
) -> Finding:
    steps = steps_of(padded.subject, padded.inputs, **padded.masks)
    line = masking_line(steps, padded.inputs, argument=str(padded.mask.argument))
    if fix == _APART:
        line = line_over_sequence(steps, padded.inputs.key_length) or line
    if severity == "error" and fix == _HIDE and _is_hidden(padded):
        message += " The weights of padded keys are exactly 0: something around the attention joins positions."
        hidden = MaskCode(padded.mask, rank=3).keys
        fix = f"x = x.masked_fill({hidden}, 0.0)  # before a mean or sum, and divide by the real positions"
        line = line_over_sequence(steps, padded.inputs.key_length)
    fix = fix or mask_code(padded.mask, steps, padded.inputs).hiding
    return Finding("padding", "padding", severity, message, effect, fix, evidence, line)  # type: ignore[arg-type]


def _is_hidden(padded: _PaddedSubject) -> bool:
    """Whether every attention over the padded positions gives them no weight."""
    attentions = _attentions(padded)
    hidden = ~padded.real[:, None, None, :]
    return bool(attentions) and not any(
        bool((hidden & (attention.weights.cpu() != 0)).any()) for attention in attentions
    )


def _attentions(padded: _PaddedSubject) -> list[TracedAttention]:
    attentions = attentions_of(padded.subject, padded.inputs, **padded.masks)
    items, length = padded.real.shape
    return [
        attention
        for attention in attentions
        if attention.weights.shape[-1] == length and attention.weights.shape[0] == items
    ]


CHECK = Check(
    "padding",
    "padding",
    "Real positions do not depend on the content or the length of the padding",
    "Batches of several lengths are padded right and left; the padding is filled with other numbers, with large ones "
    "and with NaN, made longer, and one item is all padding",
    "Otherwise the result for a sentence depends on its batch.",
    _run,
    follows_from=("mask-meaning", "mixing", "softmax", "dropout"),
)
