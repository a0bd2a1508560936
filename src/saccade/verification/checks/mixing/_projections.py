"""Whether every projection of an attention module is used once, for its purpose.

Shape legend: L positions, E model width.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ....interception._tracing import memory_of
from ...findings._finding import Finding, Inapplicable, Location, TargetError
from ...findings._words import spans
from ...subject._source import line_with, return_after, taken_twice
from ...tracing._flow import TargetFlow, followed
from ...tracing._trace import traced
from ...tracing._visible import steps_of
from ...tracing._wiring import AttentionWiring, PositionwiseMap, gradients_to, ready
from ._heads import HeadLayout

_NAME = "mixing"
_error = partial(Finding, _NAME, _NAME, "error")
_warning = partial(Finding, _NAME, _NAME, "warning")
_note = partial(Finding, _NAME, _NAME, "note")
_ONE_FOR_ANOTHER = r"^\s*(k|v|key\w*|value\w*)\s*=\s*(q|k|query\w*|queries|key\w*)\s*$"  # v = k


def projections(wiring: AttentionWiring, structure: HeadLayout | None) -> Iterator[Finding]:
    """Shared, unused, dead or missing projections, worst first; at most one error."""
    unused, twice = _unused(wiring), _used_twice(wiring)
    if twice:
        yield _shared(wiring, twice, unused)
    elif wiring.merged is None and wiring.subject.form != "attention" and _heads_known(wiring, structure) > 1:
        yield _no_output(wiring, _heads_known(wiring, structure), unused)
    elif unused:
        yield _never_used(unused)
    elif (dead := _dead(wiring)) is not None:
        yield _dead_channels(wiring, *dead)
    elif structure is not None and structure.shared:
        yield _note(
            "Keys and values are the same projection of the input.",
            "Some models do this on purpose; it halves the cache.",
            "",
        )


def _heads_known(wiring: AttentionWiring, structure: HeadLayout | None) -> int:
    return structure.count if structure is not None else wiring.subject.reading.heads or 1


def _unused(wiring: AttentionWiring) -> list[str]:
    """Matrices of the modules with the projections that the call does not use."""
    module = wiring.subject.module
    assert module is not None
    beside = {_parent(module, projection.name) for projection in wiring.projections}
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1 and _parent(module, name) in beside and memory_of(parameter) not in wiring.flow.touched
    ]


def _parent(module: nn.Module, name: str) -> str:
    """Name of the attention module that has a projection: "attn" for "attn.q_proj.weight", for "attn.w_q", and for
    "attn.to_out.0.weight", where `to_out` is an nn.Sequential."""
    path = name.split(".")
    path = path[:-2] if path[-1] == "weight" else path[:-1]
    while path and isinstance(module.get_submodule(".".join(path)), nn.Sequential):
        path = path[:-1]
    return ".".join(path)


def _used_twice(wiring: AttentionWiring) -> list[tuple[PositionwiseMap, list[str]]]:
    """Projections that share a weight with another projection, each with all names of that weight."""
    by_weight: dict[tuple[int, tuple[int, ...]], list[PositionwiseMap]] = {}
    for projection in wiring.projections:
        if projection.weight is not None:
            by_weight.setdefault((projection.weight.data_ptr(), tuple(projection.weight.shape)), []).append(projection)
    assert wiring.subject.module is not None
    names: dict[int, list[str]] = {}
    for name, parameter in wiring.subject.module.named_parameters(remove_duplicate=False):
        names.setdefault(memory_of(parameter), []).append(name)
    return [
        (group[-1], names.get(memory_of(weight), []))
        for group in by_weight.values()
        if len(group) > 1 and (weight := group[0].weight) is not None
    ]


def _shared(wiring: AttentionWiring, twice: list[tuple[PositionwiseMap, list[str]]], unused: list[str]) -> Finding:
    projection, names = twice[0]
    by_accident = bool(unused) or len(names) > 1 or len(twice) > 1
    message = f"{projection.name} projects more than one of queries, keys and values"
    if len(twice) > 1:
        message = f"{', '.join(each.name for each, _ in twice)} are each used more than once, as if heads were one"
    elif len(names) > 1:
        message += f": {' and '.join(names)} are one and the same parameter"
    if unused:
        message += f", while {', '.join(unused)} {'is' if len(unused) == 1 else 'are'} never used"
    return Finding(
        _NAME,
        _NAME,
        "error" if by_accident else "warning",
        message + ".",
        "Identical queries and keys make every token attend mostly "
        "to itself; identical heads compute the same thing. The model has fewer parameters than it seems to.",
        "Give each its own projection and use it: k = self.k_proj(x); a list of modules with [Head() for _ in "
        "range(n)], not [Head()] * n.",
        {"shared": [each.name for each, _ in twice], "names": names, "unused": unused},
        _where_shared(wiring, names) or projection.location,
    )


def _no_output(wiring: AttentionWiring, count: int, unused: list[str]) -> Finding:
    declared = f" ({', '.join(unused)} is declared and never used)" if unused else ""
    return Finding(
        _NAME,
        _NAME,
        "error" if unused else "warning",
        f"The {count} heads are put side by side and returned: nothing mixes them{declared}.",
        "Each head writes to its own slice of the output only, so heads cannot work together, and layers after this "
        "one get less than the published design gives.",
        "return self.out_proj(out.transpose(1, 2).reshape(B, L, H * D)), with self.out_proj = nn.Linear(H * D, E).",
        {"heads": count, "unused": unused},
        _last_line(wiring),
    )


def _never_used(unused: list[str]) -> Finding:
    single = len(unused) == 1
    return _warning(
        f"{', '.join(unused)} {'stands' if single else 'stand'} beside the projections and "
        f"{'takes' if single else 'take'} no part in a call.",
        "Parameters that are saved and never trained; often another projection is used in their place.",
        "Use it in forward, or remove it.",
        {"unused": unused},
    )


def _dead(wiring: AttentionWiring) -> tuple[PositionwiseMap, list[int]] | None:
    """A projection with channels that reach nothing, a quarter of it or more."""
    out = wiring.flow.result.out
    weight = torch.linspace(1.0, 2.0, out.numel(), dtype=out.dtype).view(out.shape)
    outs = [projection.out for projection in wiring.projections]
    gradients = gradients_to((out * weight).sum(), outs)
    for projection, gradient in zip(wiring.projections, gradients, strict=True):
        flat = torch.zeros(projection.out.numel(), dtype=out.dtype) if gradient is None else gradient.flatten()
        still = (flat[projection.slots] == 0).all(0).nonzero().flatten()
        # a gradient may be missing for other reasons: then other numbers there change the output
        large = projection.place >= 0 and len(still) * 4 >= projection.slots.shape[1]
        if large and torch.equal(_without(wiring, projection, still).result.out, out):
            return projection, still.tolist()
    return None


def _without(wiring: AttentionWiring, layer: PositionwiseMap, channels: Tensor, *, every: bool = False) -> TargetFlow:
    """The call with other numbers in these channels."""

    def change(place: int, out: Tensor) -> Tensor:
        if place != layer.place:
            return out
        new = out.detach().clone()
        new.view(-1)[layer.slots[:, channels]] += 3.0
        return new

    return followed(ready(wiring.original), wiring.inputs, change, every=every)


def _dead_channels(wiring: AttentionWiring, layer: PositionwiseMap, channels: list[int]) -> Finding:
    return _error(
        f"Channels {spans(channels)} ({len(channels)} of {layer.slots.shape[1]}) of {layer.name} reach no output"
        + (": queries and keys are the same numbers." if _same_operands(wiring)[0] == "scores" else "."),
        "A part of the projection is computed and thrown away; another part serves in its place, as queries and keys "
        "or keys and values at once.",
        "q, k, v = self.qkv(x).chunk(3, dim=-1), each used once.",
        {"projection": layer.name, "channels": channels},
        line_with(wiring.original, _ONE_FOR_ANOTHER)
        or _part_for_another(wiring, layer, channels)
        or _dropped(wiring, layer, torch.tensor(channels))
        or layer.location,
    )


def _part_for_another(wiring: AttentionWiring, layer: PositionwiseMap, channels: list[int]) -> Location | None:
    """The line of a joint projection of queries, keys and values that uses another part in place of the lost part; None
    if unknown."""
    thirds = {3 * channel // layer.slots.shape[1] for channel in channels}
    if len(thirds) > 1:
        return None
    lost = "qkv"[thirds.pop()]
    named = [line for name, line in taken_twice(wiring.original) if name.lower().strip("x_").startswith(lost)]
    return named[0] if named else None


def _dropped(wiring: AttentionWiring, layer: PositionwiseMap, channels: Tensor) -> Location | None:
    """The line that drops these channels: the line that uses another part in their place, else the first line that
    reads them and does not pass them on."""
    steps = followed(ready(wiring.original), wiring.inputs, every=True).steps
    changed = _without(wiring, layer, channels, every=True).steps
    moved = [bool((a.out != b.out).any()) for a, b in zip(steps, changed, strict=False)]
    alone = any(bool((a.out != b.out).all()) for a, b in zip(steps, changed, strict=False))
    twins = _same_operands(wiring)[1]
    if alone:
        return twins
    first = next((at for at, held in enumerate(moved) if held), len(moved))
    taking = (
        step
        for at, step in enumerate(steps[first:], first)
        if not moved[at] and any(moved[k] for k in step.given if k >= 0)
    )
    return next((step.location for step in taking if step.location is not None), twins)


def _same_operands(wiring: AttentionWiring) -> tuple[str, Location | None]:
    """ "scores" where keys are multiplied by keys, "values" where values are keys or queries, and the line of that
    product."""
    try:
        attentions = traced(wiring.original.fresh(), wiring.inputs).attentions
    except (Inapplicable, TargetError):
        return "", None
    for each in attentions:
        if _are_same(each.query, each.key):
            return "scores", each.lines.get("scores")
        if each.value is not None and (_are_same(each.value, each.key) or _are_same(each.value, each.query)):
            return "values", each.lines.get("values")
    return "", None


def _are_same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and torch.equal(tensor, other)


def _where_shared(wiring: AttentionWiring, names: list[str]) -> Location | None:
    """The line that gives one module two names: `self.k = self.q`, or a list that holds one module many times."""
    for owner, other in itertools.permutations({_owner(name) for name in names}, 2):
        line = line_with(wiring.original, rf"\.{re.escape(owner)}\s*=\s*\w+\.{re.escape(other)}\s*$")
        if line is not None:
            return line
    return line_with(wiring.original, r"\]\s*\*\s*\w") if len(names) > 1 else None


def _owner(name: str) -> str:
    """The name of a projection: "k_proj" for "attn.k_proj.weight", "w_k" for "attn.w_k"."""
    path = name.split(".")
    return path[-2] if path[-1] == "weight" and len(path) > 1 else path[-1]


def _last_line(wiring: AttentionWiring) -> Location | None:
    """The `return` of the heads after the last traced step."""
    steps = steps_of(wiring.original, wiring.inputs)
    last = next((step.location for step in reversed(steps) if step.location is not None), None)
    return last and (return_after(wiring.original, last) or last)
