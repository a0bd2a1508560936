"""Which channel of which projection reaches which head: read from the graph of one call.

A projection's result has a slot for every position and channel, whatever its shape. What the output projection is given
("merged") has elements; each row of it belongs to a position. The gradient of an element with respect to the slots says
what it was made from: its query from one position, keys and values from all that are seen.

Shape legend: L positions, C channels of all projections together, N elements of one merged row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...interception._tracing import memory_of
from ..findings._finding import Inapplicable, Location, Unmeasured
from ..subject._inputs import NamedInputs
from ..subject._subject import Subject
from ._flow import LinearMap, TargetFlow, followed

_MOST_ELEMENTS = 128  # of a row; of wider ones every so many are looked at


@dataclass(frozen=True, eq=False)
class PositionwiseMap:
    """A linear map (or an input of attention proper) whose result at a position depends only on that position."""

    out: Tensor
    slots: Tensor  # (L, channels) where in the flattened `out` they stand
    name: str  # of its parameter, or of the input
    place: int  # of its map among all; -1: an input
    weight: Tensor | None
    location: Location | None


@dataclass(frozen=True, eq=False)
class MergedRow:
    """The origin of one row of the merged heads."""

    position: int
    elements: Tensor  # (N,) their order within the row
    width: int  # of the row
    made_from: Tensor  # (N, L, C) booleans


@dataclass(frozen=True, eq=False)
class AttentionWiring:
    """The first attention of a target."""

    projections: tuple[PositionwiseMap, ...]
    rows: tuple[MergedRow, ...]
    merged: LinearMap | None  # the output projection; None: there is none, rows are of the output itself
    flow: TargetFlow
    changed: tuple[TargetFlow, ...]  # the same call with each position of each input changed
    subject: Subject  # the copy that was followed
    original: Subject  # of which it is a copy
    inputs: NamedInputs

    @property
    def channels(self) -> list[tuple[int, int]]:
        """(projection, channel) of each of the C."""
        return [(p, c) for p, projection in enumerate(self.projections) for c in range(projection.slots.shape[1])]


def wiring(subject: Subject, length: int) -> AttentionWiring:
    """Follow one call of `length` positions.

    Raises:
        Inapplicable: its linear maps do not form a known kind of attention.
    """
    original, subject = subject, ready(subject)
    inputs = subject.inputs(1, length, dtype=subject.dtype if subject.module is not None else torch.float64).leaves()
    flow = followed(subject, inputs)
    if not flow.result.out.requires_grad:
        raise Unmeasured("its output has no gradient to follow")
    changed = _changed_flows(original, inputs, flow)
    given = [_labels(flow, changed, place, "given") for place in range(len(flow.maps))]
    end = next((place for place, label in enumerate(given) if (label.sum(-1) > 1).any()), len(flow.maps))
    merged = _output_projection(flow, end, length)
    projections = _projections(subject, flow, changed, end, length) or _leaves(subject, inputs)
    rows = _merged_rows(flow, changed, merged, given, length)
    made = tuple(_row(at, *rows[at], projections) for at in sorted({length - 1, length // 2}))
    return AttentionWiring(tuple(projections), made, merged, flow, tuple(changed), subject, original, inputs)


def ready(subject: Subject) -> Subject:
    """A copy whose parameters collect gradients."""
    copy = subject.fresh()
    for parameter in copy.module.parameters() if copy.module is not None else ():
        parameter.requires_grad_(parameter.is_floating_point())
    return copy


def _changed_flows(subject: Subject, inputs: NamedInputs, flow: TargetFlow) -> list[TargetFlow]:
    """The call again for each position of each input, with that position changed."""
    flows = []
    for name, tensor in inputs.tensors.items():
        for position in range(tensor.shape[1] if inputs.vocabulary else tensor.shape[-2]):
            other = inputs.changed([position]).tensors[name]
            new = followed(ready(subject), replace(inputs, tensors={**inputs.tensors, name: other}).leaves())
            if [linear_map.out.shape for linear_map in new.maps] != [linear_map.out.shape for linear_map in flow.maps]:
                raise Unmeasured("it computes something else for other numbers")
            flows.append(new)
    return flows


def _output_projection(flow: TargetFlow, end: int, length: int) -> LinearMap | None:
    """The first later map with one row for each position. A map that mixes the scores of heads ("talking heads") has
    more rows.

    Raises:
        Inapplicable: there are such maps, and none gives rows for positions.
    """
    later = flow.maps[end:]
    fitting = [linear_map for linear_map in later if linear_map.out.numel() == length * linear_map.out.shape[-1]]
    if later and not fitting:
        raise Unmeasured("its output projection does not give one row for each position")
    return fitting[0] if fitting else None


def _labels(flow: TargetFlow, changed: Sequence[TargetFlow], place: int, what: str) -> Tensor:
    """(elements, changes): which changes reach which elements of a map's `given` or `out`."""
    before = getattr(flow.maps[place], what).detach().flatten()
    return torch.stack([before != getattr(flow.maps[place], what).detach().flatten() for flow in changed], -1)


def _projections(
    subject: Subject, flow: TargetFlow, changed: Sequence[TargetFlow], end: int, length: int
) -> list[PositionwiseMap]:
    """The last position-wise maps before `end`: no other position-wise operation takes their result."""
    names = names_of(subject)
    kept = []
    for place, linear_map in enumerate(flow.maps[:end]):
        later = [other.given for other in flow.maps[place + 1 : end] if other.given.requires_grad]
        if any(gradients_to(g.sum(), [linear_map.out])[0] is not None for g in later):
            continue
        slots = _slots(_labels(flow, changed, place, "out"), length)
        if slots is not None:
            name = names.get(memory_of(linear_map.weight), "a parameter")
            kept.append(PositionwiseMap(linear_map.out, slots, name, place, linear_map.weight, linear_map.location))
    return kept


def _slots(labels: Tensor, length: int) -> Tensor | None:
    """(L, channels) elements by the one position that each comes from."""
    if not bool((labels.sum(-1) == 1).all()):
        return None
    position = labels.int().argmax(-1) % length
    if len(position) % length or (position.bincount(minlength=length) != len(position) // length).any():
        return None
    return position.argsort(stable=True).view(length, -1)


def _leaves(subject: Subject, inputs: NamedInputs) -> list[PositionwiseMap]:
    """Inputs in place of projections, if the target has no projections."""
    if inputs.vocabulary:
        raise Inapplicable("it has no projections")
    leaves = []
    for name, tensor in inputs.tensors.items():
        order = torch.arange(tensor.numel()).view(tensor.shape)
        slots = order[0] if tensor.dim() == 3 else order[0].transpose(0, 1).flatten(1)
        leaves.append(PositionwiseMap(tensor, slots, name, -1, None, None))
    return leaves


def _merged_rows(
    flow: TargetFlow, changed: Sequence[TargetFlow], merged: LinearMap | None, given: list[Tensor], length: int
) -> list[tuple[Tensor, Tensor]]:
    """For each position: the tensor that holds its merged row, flat, and the elements."""
    out = flow.result.out
    if merged is None:
        order = torch.arange(out.numel()).view(out.shape)[0]
        by_position = order if out.dim() == 3 else order.transpose(0, 1).flatten(1)
        return [(out.flatten(), by_position[at]) for at in range(length)]
    results = merged.out.reshape(-1, merged.out.shape[-1])
    rows = []
    for at in _row_order(flow, merged, length):
        weight = torch.linspace(1.0, 2.0, results.shape[-1], dtype=results.dtype)
        (gradient,) = gradients_to((results[at] * weight).sum(), [merged.given])
        reached = merged.given.new_zeros(0) if gradient is None else gradient.flatten()
        rows.append((merged.given.flatten(), reached.nonzero().flatten()))
    return rows


def _row_order(flow: TargetFlow, merged: LinearMap, length: int) -> list[int]:
    """For each output, the row of the output projection's result that reaches it. The rows are in order unless each
    output is reached by one row."""
    out = flow.result.out
    order = []
    for position in range(length):
        target = out[0, ..., position, :]
        weight = torch.linspace(1.0, 2.0, target.numel(), dtype=out.dtype).view(target.shape)
        (gradient,) = gradients_to((target * weight).sum(), [merged.out])
        if gradient is None:
            return list(range(length))
        order.append(gradient.reshape(length, -1).any(-1).nonzero().flatten().tolist())
    single = [reached[0] for reached in order if len(reached) == 1]
    return single if sorted(single) == list(range(length)) else list(range(length))


def _row(position: int, tensor: Tensor, elements: Tensor, projections: Sequence[PositionwiseMap]) -> MergedRow:
    step = max(1, -(-len(elements) // _MOST_ELEMENTS))
    chosen = torch.arange(0, len(elements), step)
    outs = [projection.out for projection in projections]
    made = []
    for element in elements[chosen].tolist():
        gradients = gradients_to(tensor[element], outs)
        made.append(
            torch.cat([_reached(g, projection.slots) for g, projection in zip(gradients, projections, strict=True)], -1)
        )
    return MergedRow(position, chosen, len(elements), torch.stack(made))


def gradients_to(total: Tensor, outs: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of a number; None if no gradient leads: a tensor made under no_grad has none."""
    wanted = [out for out in outs if out.requires_grad]
    try:
        gradients = iter(torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True) if wanted else ())
    except RuntimeError as error:
        raise Unmeasured("its backward pass raises, see gradients") from error
    return [next(gradients) if out.requires_grad else None for out in outs]


def _reached(gradient: Tensor | None, slots: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(slots, dtype=torch.bool)
    if not torch.isfinite(gradient).all():
        raise Unmeasured("its gradients are not finite")
    return gradient.flatten()[slots] != 0


def names_of(subject: Subject) -> dict[int, str]:
    """The names of parameters, by the address of their memory."""
    if subject.module is None:
        return {}
    return {memory_of(parameter): name for name, parameter in subject.module.named_parameters()}
