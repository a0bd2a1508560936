"""Padding of a whole model: padded tokens must not reach a real output, on the right or, in decoding, on the left.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....support._numbers import rounded
from ...findings._finding import Finding
from ...subject._influence import is_causal
from ...subject._inputs import NamedInputs
from ...subject._subject import Subject
from ...subject._token_models import EncoderDecoderModel
from ._common import NAME, NOISE, LargestDifference, error, fitting, given, judged, largest, output, padding_line

_warning = partial(Finding, NAME, NAME, "warning")

_EFFECT = "The result for a sequence changes with the length and content of the padding in its batch."


def padding(subject: Subject) -> Iterator[Finding]:
    """All findings about padding. After an error the remaining parts are skipped: they would report it again."""
    if not any(mask.axes.replace("1", "") == "BK" for mask in subject.reading.masks):
        return
    length = fitting(subject, 9)
    if length < 4:
        return
    for part in (_content, _longer, _left, _empty):
        findings = list(part(subject, length))
        yield from findings
        if any(finding.severity == "error" for finding in findings):
            return


def _content(subject: Subject, length: int) -> Iterator[Finding]:
    """Real outputs must not change with the tokens in the padding."""
    sides = ("right", "left") if is_causal(subject) else ("right",)
    inputs = subject.inputs(3, length)
    for side in sides:
        real = _real(length, [length, length - 3, 2], side)
        other = _padded_with_others(inputs, real)
        with torch.no_grad():
            before, after = subject(inputs, padding=real).out, subject(other, padding=real).out
            free = largest(subject(other).out, subject(inputs).out).size or 1.0  # the effect that it may have unmasked
        gap = largest(after, before, real)
        if gap.size > NOISE * free:
            yield error(
                f"With padding on the {side} output {gap.position} of item {gap.item}, a real one, changes by "
                f"{gap.size:.3g} when only padded tokens do.",
                _EFFECT,
                "scores = scores.masked_fill(~attention_mask[:, None, None, :].bool(), float('-inf'))  "
                "# in every layer, before the softmax",
                {"side": side, "item": gap.item, "position": gap.position, "change": rounded(gap.size)},
                padding_line(subject, inputs, real),
            )
            return


def _longer(subject: Subject, length: int) -> Iterator[Finding]:
    """Outputs of the same tokens must not change when padding follows."""
    inputs, short = subject.inputs(2, length), length - 3
    real = _real(length, [short, short], "right")

    def measure(subject: Subject) -> LargestDifference:
        return largest(subject(inputs, padding=real).out[:, :short], subject(inputs.cut(slice(0, short))).out)

    with torch.no_grad():
        gap, counts = judged(subject, measure)
    if gap.relative > counts:
        yield error(
            f"{short} tokens give something else when {length - short} padded ones follow them: output "
            f"{gap.position} differs by {gap.size:.3g} ({gap.relative:.2g} of the largest output).",
            _EFFECT,
            "Mask padded keys before the softmax, and take no mean, norm or position over padded places",
            {"length": short, "padded": length - short, "position": gap.position, "relative": gap.relative},
            padding_line(subject, inputs, real),
        )


def _left(subject: Subject, length: int) -> Iterator[Finding]:
    """Outputs must not change when padding precedes, as in batched generation: positions must then count only real
    tokens."""
    if not is_causal(subject) or isinstance(subject.target, EncoderDecoderModel):
        return
    inputs, ahead = subject.inputs(2, length), 3
    real = _real(length, [length - ahead] * 2, "left")
    positions = _positions(subject, real)

    def measure(subject: Subject, positions: dict[str, Tensor]) -> LargestDifference:
        alone = subject(inputs.cut(slice(ahead, length))).out
        padded = _positioned(subject, inputs, real, positions) if positions else subject(inputs, padding=real).out
        return largest(padded[:, ahead:], alone)

    with torch.no_grad():
        bare, counts = judged(subject, lambda model: measure(model, {}))
        if bare.relative <= counts:
            return
        counted, counts = judged(subject, lambda model: measure(model, positions)) if positions else (None, counts)
    numbers = {"ahead": ahead, "position": bare.position, "relative": rounded(bare.relative)}
    if counted is not None and counted.relative > counts:
        yield error(
            f"With {ahead} padded tokens in front and position_ids that count the real ones, output {counted.position} "
            f"differs by {counted.size:.3g} from the same tokens without padding.",
            _EFFECT,
            "position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # and use them in every layer",
            numbers,
        )
        return
    how = (
        "give position_ids, as generate() does" if counted is not None else "pad on the right: it takes no position_ids"
    )
    yield Finding(
        NAME,
        NAME,
        "note" if counted is not None else "warning",
        f"Padding in front moves positions: {ahead} padded tokens change outputs by {bare.size:.3g}, though masked.",
        "Batched generation from prompts padded on the left differs from prompts one by one.",
        f"position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # {how}",
        numbers,
    )


def _empty(subject: Subject, length: int) -> Iterator[Finding]:
    """An item that is all padding, as the last batch of a data set may have it, must not change other items."""
    inputs = subject.inputs(3, length)
    full = _real(length, [length, length, length], "right")
    none = full.clone()
    none[1] = False
    with torch.no_grad():
        before, after = subject(inputs, padding=full).out, subject(inputs, padding=none).out
    kept = largest(after[[0, 2]], before[[0, 2]])
    if kept.relative > NOISE:
        yield error(
            f"An item of padding alone changes another item of the batch: its output {kept.position} by "
            f"{kept.size:.3g}.",
            _EFFECT,
            "Normalise and pool within each item alone",
            {"position": kept.position, "change": kept.size},
        )
    elif not after[1].isfinite().all():
        yield _warning(
            "An item of nothing but padding gives NaN.",
            "A loss over all items is NaN as soon as one batch is filled up with an empty item.",
            "torch.nan_to_num(weights)  # or a large negative number in place of -inf",
            {"nan": int((~after[1].isfinite()).sum())},
        )


def _real(length: int, counts: list[int], side: str) -> Tensor:
    """(B, L), True = real."""
    at = torch.arange(length)
    rows = [at < count if side == "right" else at >= length - count for count in counts]
    return torch.stack(rows)


def _padded_with_others(inputs: NamedInputs, real: Tensor) -> NamedInputs:
    other = inputs.changed(slice(0, inputs.length))
    return inputs.map(lambda tokens: torch.where(real.to(tokens.device), tokens, other["tokens"]))


def _positions(subject: Subject, real: Tensor) -> dict[str, Tensor]:
    target: Any = subject.target
    if "position_ids" not in inspect.signature(target.forward).parameters:
        return {}
    return {"position_ids": (real.long().cumsum(-1) - 1).clamp(min=0).to(subject.device)}


def _positioned(subject: Subject, inputs: NamedInputs, real: Tensor, positions: dict[str, Tensor]) -> Tensor:
    mask = subject.reading.masks[0]
    given_mask = {str(mask.argument): real.long().to(subject.device)}
    return output(subject, given(subject, inputs, **given_mask, **positions))
