"""The line at which batch items are mixed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._inputs import NamedInputs
from ..subject._subject import Subject
from ._flow import followed


def batch_mixing_line(subject: Subject, inputs: NamedInputs) -> Location | None:
    """The first line whose result depends on two batch items at one place."""
    try:
        before = followed(subject.fresh(), inputs, every=True).steps
        changed = [
            followed(subject.fresh(), inputs.changed(slice(None), item=item), every=True).steps
            for item in range(inputs.batch)
        ]
    except (Inapplicable, TargetError):
        return None
    for place, step in enumerate(before):
        outs = [
            steps[place].out for steps in changed if place < len(steps) and steps[place].out.shape == step.out.shape
        ]
        if len(outs) == inputs.batch and step.location is not None and _overlap(step.out, outs):
            return step.location
    return None


def _overlap(before: Tensor, outs: Sequence[Tensor]) -> bool:
    """Whether some element differs from `before` in more than one of the outputs."""
    return bool((torch.stack([out != before for out in outs]).sum(0) > 1).any())
