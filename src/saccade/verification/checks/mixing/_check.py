"""Promise: batch items, positions, heads and channels of projections that must stay separate are not mixed.

Shape legend: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....support._restored import seeded
from ...findings._finding import Finding, Inapplicable, Severity, TargetError, Unmeasured
from ...subject._check import Check
from ...subject._inputs import NamedInputs
from ...subject._steady import exact, steady, takes, tolerance
from ...subject._subject import Subject
from ...tracing._flow import batch_mixing_line
from ...tracing._visible import attentions_of
from ...tracing._wiring import wiring
from ._mixed_heads import mixed

_NAME = "mixing"
_error = partial(Finding, _NAME, _NAME, "error")


def _run(subject: Subject) -> Iterator[Finding]:
    random = _is_random(subject)
    axis = _axis(subject)
    if axis == "batch":
        raise Unmeasured("the softmax runs over the batch axis instead of the keys, so mixing cannot be measured")
    findings = [*_items(subject), *([] if random else _single_item(subject))]
    if findings and subject.form == "tokens":
        raise Inapplicable("batch items affect one another, which the model check reports")
    yield from findings[:1]
    if findings:
        return
    if random:
        raise Unmeasured("it draws random numbers in eval mode, so that calls cannot be compared")
    if axis in ("query", "head"):
        raise Unmeasured(f"the softmax runs over the {axis} axis instead of the keys, so mixing cannot be measured")
    yield from _structure(subject)


def _is_random(subject: Subject) -> bool:
    """Whether the target's output depends on random numbers that it draws.

    Raises:
        Inapplicable: it depends on something else, too.
    """
    inputs = subject.inputs(3, 5)
    first, same, other = (steady(subject, inputs, seed).out.nan_to_num() for seed in (0, 0, 1))
    if not torch.equal(first, same):
        raise Unmeasured("two calls with the same input differ")
    return not torch.equal(first, other)


def _axis(subject: Subject) -> str:
    attentions = attentions_of(subject, subject.inputs(2, 5))
    return attentions[0].normalised if attentions else "unknown"


# --- batch items


def _items(subject: Subject) -> Iterator[Finding]:
    inputs = subject.inputs(3, 5)
    for training in (False, True):
        try:
            moved = _moved_item(subject, inputs, training)
        except (Inapplicable, TargetError):
            if not training:
                raise
            continue
        if moved is not None:
            yield _items_meet(subject, inputs, *moved, training)
            return


def _moved_item(subject: Subject, inputs: NamedInputs, training: bool) -> tuple[int, int, float] | None:
    """(item whose input is changed, another item whose output changes, by how much); None if no other item changes."""
    before = _outputs(subject, inputs, training)
    for item in range(inputs.batch):
        after = _outputs(subject, inputs.changed(slice(None), item=item), training)
        others = [other for other in range(inputs.batch) if other != item]
        for other in others:
            by = (after[other] - before[other]).abs().nan_to_num().max().item()
            if by > 0:
                return item, other, by
    return None


def _outputs(subject: Subject, inputs: NamedInputs, training: bool) -> Tensor:
    if not training:
        return steady(subject, inputs).out
    copy = subject.fresh()
    with copy.training(), seeded(0, devices=None), torch.no_grad():
        return copy(inputs).out


def _items_meet(subject: Subject, inputs: NamedInputs, item: int, other: int, by: float, training: bool) -> Finding:
    mode = "in training mode " if training else ""
    severity: Severity = "warning" if training and _has_batch_norm(subject) else "error"
    why = "; it has batch normalisation, which does this" if severity == "warning" else ""
    return Finding(
        _NAME,
        _NAME,
        severity,
        f"The output of batch item {other} changes by {by:.3g} when batch item {item} changes {mode}(of 3 items){why}.",
        "A sample's result depends on which others it happens to share a batch with: results cannot be repeated, and "
        "evaluation leaks between samples.",
        "Keep the batch axis first in every view and reshape: x.view(B, L, H, D).transpose(1, 2); sum and normalise "
        "over positions and channels only.",
        {"changed item": item, "moved item": other, "by": by, "training": training},
        batch_mixing_line(subject, inputs),
    )


def _has_batch_norm(subject: Subject) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return subject.module is not None and any(isinstance(module, _BatchNorm) for module in subject.module.modules())


def _single_item(subject: Subject) -> Iterator[Finding]:
    """Findings: an item by itself must give the same output as in a batch of three."""
    copy = exact(subject)
    inputs = copy.inputs(3, 5)
    together = steady(copy, inputs).out
    try:
        apart = torch.cat([steady(copy, inputs.items([item])).out for item in range(3)])
    except TargetError:
        return  # no batch of one: the robustness check says so
    if apart.shape != together.shape:
        return
    by = (apart - together).abs().nan_to_num().flatten(1).max(-1).values
    if by.max() > tolerance(copy, inputs, together):
        item = int(by.argmax())
        yield _error(
            f"Batch item {item} alone gives another output than in a batch of 3 (by {by[item]:.3g}).",
            "A sample's result depends on the size of its batch: what was trained in large batches is wrong when used "
            "one by one.",
            "Keep the batch axis first in every view and reshape: x.view(B, L, H, D).transpose(1, 2).",
            {"item": item, "by": float(by[item])},
            batch_mixing_line(subject, inputs),
        )


# --- heads and projections


def _structure(subject: Subject) -> Iterator[Finding]:
    for variant in _variants(subject):
        length = _length(variant)
        if strangers := list(_other_heads(variant, length)):
            yield from strangers
            return
        try:
            wired = wiring(exact(variant), length)
        except TargetError:
            if variant is subject:
                raise
            continue
        findings = list(mixed(wired, length))
        yield from findings
        if findings:
            return


def _other_heads(subject: Subject, length: int) -> Iterator[Finding]:
    """Findings: in attention proper, the output of a head must not depend on the queries of another head."""
    if subject.form != "attention":
        return
    try:
        copy = exact(subject)
        inputs = copy.inputs(1, length)
        before = steady(copy, inputs).out
    except TargetError:
        return  # told where the head sizes are tried
    for head in range(inputs["query"].shape[1]):
        changed = inputs["query"].clone()
        changed[:, head] = -2 * changed[:, head] + 1
        after = steady(copy, replace(inputs, tensors={**inputs.tensors, "query": changed})).out
        moved = (after - before).abs().nan_to_num().amax((0, 2, 3))
        others = [
            other for other in range(len(moved)) if other != head and moved[other] > tolerance(copy, inputs, before)
        ]
        if others:
            kv_heads = inputs["key"].shape[1]
            yield _error(
                f"The output of head {others[0]} changes by {moved[others[0]]:.3g} when the queries of head {head} "
                f"change ({len(moved)} query heads, {kv_heads} key heads): queries of several heads are summed.",
                "Heads that share keys attend to the same positions: they are one head, repeated.",
                "Keep the axis of a group's queries: torch.einsum('bgrqd,bgkd->bgrqk', q, k)",
                {"changed head": head, "moved head": others[0], "by": float(moved[others[0]]), "kv_heads": kv_heads},
                next(
                    (
                        attention.lines["scores"]
                        for attention in attentions_of(copy, inputs)
                        if "scores" in attention.lines
                    ),
                    None,
                ),
            )
            return


def _variants(subject: Subject) -> Iterator[Subject]:
    """The target; for a function of heads also with several heads, and with fewer key-value heads."""
    yield subject
    reading = subject.reading
    if subject.form == "attention" and "H" in reading.layout and reading.kv_heads is None:
        if reading.heads is None:
            yield replace(subject, reading=replace(reading, heads=3))
        if subject.module is None:
            yield replace(subject, reading=replace(reading, heads=6, kv_heads=2))


def _length(subject: Subject) -> int:
    """A length that no other axis has, of heads, head widths and their products, and that a call takes."""
    reading = subject.reading
    if reading.only_length is not None:
        return reading.only_length
    channels = reading.width * (reading.heads or 1 if subject.form == "attention" else 1)
    unlike = [length for length in (5, 7, 11, 13) if channels % length]
    return next((length for length in (*unlike, 17, 7, 5) if takes(subject, 1, length)), 17)


CHECK = Check(
    _NAME,
    _NAME,
    "Batch items, positions and heads stay apart, and no projection is lost.",
    "One batch item is changed and the others compared bit for bit; the gradient of each channel before the output "
    "projection says from which channels of which positions it was made.",
    "Code that mixes axes runs and trains without an error, because every shape fits.",
    _run,
)
