"""Which outputs depend on which inputs, exactly: an input is changed and every output compared bit for bit.

Shapes: Lq / Lk lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._inputs import Inputs
from ._subject import Subject


def influence(
    subject: Subject, inputs: Inputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> Tensor:
    """(Lq, Lk) booleans: whether output i changes when input j does, in any batch item, head or channel."""
    with torch.no_grad():
        before = subject(inputs, pairs=pairs, padding=padding).out
        columns = []
        for position in range(inputs.key_length):
            after = subject(inputs.changed([position], "key"), pairs=pairs, padding=padding).out
            columns.append(_differs(before, after, inputs.length))
    return torch.stack(columns, -1)


def direction(subject: Subject) -> str:
    """ "causal": no output ever depends on a later input; "bidirectional": all do on all; "neither": in between."""
    seen = influence(subject, subject.one_sequence(subject.inputs(2, 7)))
    if not seen.triu(1).any():
        return "causal"
    return "bidirectional" if seen.triu(1).sum() == seen.new_ones(seen.shape).triu(1).sum() else "neither"


def _differs(before: Tensor, after: Tensor, length: int) -> Tensor:
    """(Lq,) whether a position's output differs; NaN equals NaN."""
    same = (before == after) | (before.isnan() & after.isnan())
    at = 1 if before.dim() == 3 else 2
    return ~same.movedim(at, 0).reshape(length, -1).all(-1)
