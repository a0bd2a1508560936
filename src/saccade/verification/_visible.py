"""Which keys each query gives weight to, inside the target: exact, for each head, its own position included.

Shapes: B batch, H heads, L length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._finding import Inapplicable, Location, TargetError
from ._influence import seeded
from ._inputs import Inputs
from ._subject import Subject
from ._trace import SeenAttention, measured, traced

_MASKING = ("masked_fill", "masked_fill_", "where", "tril", "triu", "tril_", "triu_", "add", "add_", "mul", "mul_")


@dataclass(frozen=True, eq=False)
class Visible:
    """One attention over a sequence of its own."""

    seen: SeenAttention
    number: int  # among those of the call

    @property
    def weights(self) -> Tensor:
        """(B, H, L, L) that multiplied the values."""
        return self.seen.weights.double()

    @property
    def attends(self) -> Tensor:
        """(B, H, L, L) booleans: a weight that is not 0, NaN included."""
        return self.seen.weights != 0

    def line(self, *kinds: str) -> Location | None:
        """The source line of the first kind that is known."""
        return next((self.seen.lines[kind] for kind in kinds if kind in self.seen.lines), None)

    @property
    def is_sdpa(self) -> bool:
        return self.seen.source == "F.scaled_dot_product_attention"


def self_attentions(
    subject: Subject, inputs: Inputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> tuple[Visible, ...]:
    """Those of the call whose queries and keys are as many as the sequence is long; none where nothing was seen."""
    try:
        with seeded(), torch.no_grad():
            found = measured(subject, inputs, pairs=pairs, padding=padding)
    except (Inapplicable, TargetError):
        return ()
    length = inputs.length
    return tuple(Visible(one, at) for at, one in enumerate(found) if one.weights.shape[-2:] == (length, length))


def masking_line(
    subject: Subject, inputs: Inputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> Location | None:
    """Where the target hides keys, by the name of the call that does."""
    try:
        with seeded(), torch.no_grad():
            steps = traced(subject, inputs, pairs=pairs, padding=padding).steps
    except (Inapplicable, TargetError):
        return None
    shape = (inputs.length, inputs.key_length)
    found = [
        step.location
        for name in _MASKING
        for step in steps
        if step.name == name and step.location is not None and step.given[-2:] == shape
    ]
    return found[0] if found else None


def one_sequence(subject: Subject, batch: int, length: int, *, spread: float = 1.0, seed: int = 0) -> Inputs:
    """Inputs of one sequence; a context of another length, so that the two cannot be taken for each other."""
    context = length + 3 if subject.form == "cross" else None
    return subject.one_sequence(subject.inputs(batch, length, context, spread=spread, seed=seed))
