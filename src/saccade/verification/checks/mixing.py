"""Nothing is mixed that is to stay apart: batch items, positions, heads, the channels of projections.

Shapes: B batch, H heads, L length, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .._finding import Check, Finding, Inapplicable, Location, TargetError
from .._heads import Heads, heads, strayed, uneven
from .._inputs import Inputs
from .._projections import projections
from .._steady import exact, same_random_numbers, steady, tolerance
from .._subject import Subject
from .._trace import traced
from .._wiring import Wiring, wiring

_NAME = "mixing"


def _run(subject: Subject) -> Iterator[Finding]:
    inputs = subject.inputs(3, 5)
    if not torch.equal(*(steady(subject, inputs).out.nan_to_num() for _ in range(2))):
        raise Inapplicable("two calls with the same input differ")
    found = list(_items(subject))
    yield from found
    if found or subject.form == "tokens":
        return
    softmax_axis = _axis(subject)
    if softmax_axis in ("query", "head", "batch"):
        return  # each of them mixes what this looks at, and the softmax check names it
    yield from _structure(subject)


def _axis(subject: Subject) -> str:
    from .._trace import measured

    try:
        return measured(subject, subject.inputs(2, 5))[0].normalised
    except (Inapplicable, TargetError, IndexError):
        return "unknown"


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
            yield _influenced(subject, *moved, training)
            return
    yield from _alone(subject)


def _moved_item(subject: Subject, inputs: Inputs, training: bool) -> tuple[int, int, float] | None:
    """(item that changed, item that moved, by how much), bit for bit."""
    before = _outputs(subject, inputs, training)
    for item in range(inputs.batch):
        after = _outputs(subject, inputs.changed(slice(None), item=item), training)
        others = [other for other in range(inputs.batch) if other != item]
        for other in others:
            by = (after[other] - before[other]).abs().nan_to_num().max().item()
            if by > 0:
                return item, other, by
    return None


def _outputs(subject: Subject, inputs: Inputs, training: bool) -> Tensor:
    if not training:
        return steady(subject, inputs).out
    copy = subject.fresh()
    with copy.training(), same_random_numbers(), torch.no_grad():
        return copy(inputs).out


def _influenced(subject: Subject, item: int, other: int, by: float, training: bool) -> Finding:
    mode = "in training mode " if training else ""
    severity = "warning" if training and _has_batch_norm(subject) else "error"
    why = "; it has batch normalisation, which does this" if severity == "warning" else ""
    return Finding(
        _NAME, _NAME, severity,
        f"The output of batch item {other} changes by {by:.3g} when batch item {item} changes {mode}(of 3 items){why}.",
        "A sample's result depends on which others it happens to share a batch with: results cannot be repeated, and "
        "evaluation leaks between samples.",
        "Keep the batch axis first in every view and reshape: x.view(B, L, H, D).transpose(1, 2); sum and normalise over "
        "positions and channels only.",
        {"changed item": item, "moved item": other, "by": by, "training": training}, _line(subject, "reshape", "view"),
    )  # fmt: skip


def _has_batch_norm(subject: Subject) -> bool:
    from torch.nn.modules.batchnorm import _BatchNorm

    return subject.module is not None and any(isinstance(one, _BatchNorm) for one in subject.module.modules())


def _alone(subject: Subject) -> Iterator[Finding]:
    """An item in a batch of one is what it is in a batch of three."""
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
        yield Finding(
            _NAME, _NAME, "error",
            f"Batch item {item} alone gives another output than in a batch of 3 (by {by[item]:.3g}).",
            "A sample's result depends on the size of its batch: what was trained in large batches is wrong when used "
            "one by one.",
            "Keep the batch axis first in every view and reshape: x.view(B, L, H, D).transpose(1, 2).",
            {"item": item, "by": float(by[item])}, _line(subject, "reshape", "view"),
        )  # fmt: skip


# --- heads and projections


def _structure(subject: Subject) -> Iterator[Finding]:
    for one in _readings(subject):
        try:
            found = wiring(exact(one), 5 if one.reading.heads != 5 else 7)
        except TargetError:
            if one is subject:
                raise
            continue
        yielded = False
        for finding in _of_wiring(subject, found):
            yielded = yielded or finding.severity == "error"
            yield finding
        if yielded:
            return


def _readings(subject: Subject) -> Iterator[Subject]:
    """The target as it is; a function of heads also with several of them, and with shared key and value heads."""
    yield subject
    reading = subject.reading
    if subject.form == "attention" and "H" in reading.layout and reading.kv_heads is None:
        if reading.heads is None:
            yield replace(subject, reading=replace(reading, heads=3))
        if subject.module is None:
            yield replace(subject, reading=replace(reading, heads=6, kv_heads=2))


def _of_wiring(subject: Subject, found: Wiring) -> Iterator[Finding]:
    for row in found.rows:
        if (stray := strayed(row)) is not None:
            where = "what enters the output projection" if found.merged else "the output"
            yield Finding(
                _NAME, _NAME, "error",
                f"Row {stray.row} of {where} holds, in channels {_span(stray.elements)}, the attention of the query at "
                f"position {stray.query}: positions and heads are mixed where heads are split or merged.",
                "Each token gets the result of another one. It trains, as the mixing is the same every time, but far "
                "worse, depends on the length, and sees later tokens in spite of a causal mask.",
                "Split with x.view(B, L, H, D).transpose(1, 2), merge with out.transpose(1, 2).reshape(B, L, H * D).",
                {"row": stray.row, "query": stray.query, "channels": list(stray.elements)}, _line(subject, *_SHAPES),
            )  # fmt: skip
            return
    for row in found.rows:
        if (odd := uneven(row)) is not None:
            yield Finding(
                _NAME, _NAME, "error",
                f"For output {odd.row}, channel {odd.element}, {odd.channels[1]} key and value channels of position "
                f"{odd.many} count but {odd.channels[0]} of position {odd.few}: keys of one head are made of several "
                "heads' channels, as happens when a head axis is viewed without a transpose.",
                "Heads see parts of the sequence instead of parts of the channels.",
                "Split with x.view(B, L, H, D).transpose(1, 2), not with x.view(B, H, L, D).",
                {"row": odd.row, "channel": odd.element, "counts": list(odd.channels)}, _line(subject, *_SHAPES),
            )  # fmt: skip
            return
    structure = heads(found)
    if structure is not None:
        broken = list(_of_heads(subject, structure))
        yield from broken
        if any(one.severity == "error" for one in broken):
            return
    if subject.module is not None:
        yield from projections(found, structure)


_SHAPES = ("view", "reshape", "flatten", "transpose", "permute", "rearrange", "contiguous", "unflatten")


def _of_heads(subject: Subject, found: Heads) -> Iterator[Finding]:
    for which, reads, kv_heads in (("keys", found.reads_key, found.keys), ("values", found.reads_value, found.values)):
        expected = tuple(h * kv_heads // found.count for h in range(found.count))
        if reads != expected:
            yield _wrong_kv(subject, which, reads, expected)
            return
    if found.lands != tuple(range(found.count)):
        yield _order(subject, found, f"heads are merged in the order {list(found.lands)}")
        return
    orders = {
        "queries": found.query, "keys": found.key, "values": found.value, "the merged output": found.merged,
    }  # fmt: skip
    if len(set(orders.values())) > 1:
        odd = "; ".join(f"{role} {order}" for role, order in orders.items())
        yield _order(subject, found, odd)
    elif found.query == "interleaved" and found.count > 1:
        yield Finding(
            _NAME, _NAME, "warning",
            f"The {found.count} heads lie interleaved in the channels everywhere: head 0 is channels 0, {found.count}, "
            f"{2 * found.count}, ..., where others take channels 0 to D - 1.",
            "It computes the same kind of attention, but weights trained elsewhere do not fit.",
            "x.view(B, L, H, D) instead of x.view(B, L, D, H).",
            {"heads": found.count}, _line(subject, *_SHAPES),
        )  # fmt: skip


def _wrong_kv(subject: Subject, which: str, reads: tuple[int, ...], expected: tuple[int, ...]) -> Finding:
    heads, kv_heads = len(reads), len(set(expected))
    head = next(h for h in range(heads) if reads[h] != expected[h])
    repeated = reads == tuple(h % kv_heads for h in range(heads))
    cause = ": the order of `repeat` (0 1 0 1), not of `repeat_interleave` (0 0 1 1)" if repeated else ""
    return Finding(
        _NAME, _NAME, "error",
        f"Query head {head} reads the {which} of kv head {reads[head]} where {expected[head]} is expected; heads 0 to "
        f"{heads - 1} read {list(reads)}{cause}.",
        "Weights of published models do not fit: most heads get another head's keys and values. Trained from scratch it "
        "learns its own order, and nobody else can load it.",
        "key = key.repeat_interleave(heads // kv_heads, dim=1), and the same for value.",
        {"of": which, "reads": list(reads), "expected": list(expected)},
        _line(subject, "repeat", "expand", "repeat_interleave", *_SHAPES),
    )  # fmt: skip


def _order(subject: Subject, found: Heads, told: str) -> Finding:
    return Finding(
        _NAME, _NAME, "error",
        f"Channels are split into {found.count} heads in one order and put together in another: {told}.",
        "Trained from scratch it learns around this. Weights trained elsewhere do not fit, and whatever reads, prunes or "
        "shards single heads takes the wrong channels.",
        "Split with x.view(B, L, H, D).transpose(1, 2), merge with out.transpose(1, 2).reshape(B, L, H * D).",
        {"query": found.query, "key": found.key, "value": found.value, "merged": found.merged,
         "lands": list(found.lands)},
        _line(subject, *_SHAPES),
    )  # fmt: skip


def _span(channels: tuple[int, ...]) -> str:
    whole = len(channels) > 1 and channels == tuple(range(channels[0], channels[-1] + 1))
    return f"{channels[0]} to {channels[-1]}" if whole else ", ".join(map(str, channels[:6]))


def _line(subject: Subject, *names: str) -> Location | None:
    try:
        return traced(subject, subject.inputs(2, 5)).line(*names)
    except (Inapplicable, TargetError):
        return None


CHECK = Check(
    _NAME, _NAME,
    "Batch items, positions and heads stay apart: a head's query, keys and values are its own channels, heads are merged "
    "in the order in which they were split, and every projection is used for what it is there for.",
    "One batch item is changed and the others compared bit for bit; the gradient of each channel before the output "
    "projection says from which channels of which positions it was made.",
    "Code that mixes axes runs and trains without a word, since every shape fits.",
    _run,
)  # fmt: skip
