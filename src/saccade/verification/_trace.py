"""What attention a target forms inside: scores, softmax and weights, with the lines that form them.

`measured` is what checks use: the weights of attention proper are read from its outputs, whatever it does inside; a
module's are traced.

Shapes: B batch, Hq / Hkv heads, Lq / Lk lengths, D / Dv head widths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ._finding import Inapplicable, Location
from ._inputs import Inputs
from ._subject import Result, Subject


@dataclass(frozen=True, eq=False)
class SeenAttention:
    """One attention computation. Keys and values are expanded to the query heads."""

    query: Tensor  # (B, H, Lq, D), as they entered the product, scaled or not
    key: Tensor  # (B, H, Lk, D)
    value: Tensor | None  # (B, H, Lk, Dv), None where nobody saw it
    logits: Tensor | None  # (B, H, Lq, Lk) that entered the softmax, masked ones as they were; None: not seen
    weights: Tensor  # (B, H, Lq, Lk) that multiplied the values
    normalised: Literal["key", "query", "head", "batch", "none", "unknown"]  # the axis that the softmax ran over
    source: Literal["by hand", "F.scaled_dot_product_attention", "probed"]
    lines: Mapping[str, Location] = field(default_factory=dict)  # "scores" "mask" "softmax" "dropout" "values"


@dataclass(frozen=True, eq=False)
class Step:
    """One call of PyTorch on the way: its name ("view", "softmax"), the shapes in and out, and where."""

    name: str
    taken: tuple[tuple[int, ...], ...]
    given: tuple[int, ...]
    location: Location | None


@dataclass(frozen=True, eq=False)
class Traced:
    """One call of the target, looked into."""

    result: Result
    attentions: tuple[SeenAttention, ...]
    steps: tuple[Step, ...]

    def line(self, *names: str) -> Location | None:
        """Where the last call of one of these names stands."""
        found = [step.location for step in self.steps if step.name in names and step.location is not None]
        return found[-1] if found else None


def traced(subject: Subject, inputs: Inputs, *, pairs: Tensor | None = None, padding: Tensor | None = None) -> Traced:
    """Call the target and look at what it computes."""
    raise Inapplicable("its attention could not be followed")


def measured(
    subject: Subject, inputs: Inputs, *, pairs: Tensor | None = None, padding: Tensor | None = None
) -> tuple[SeenAttention, ...]:
    """The attention of one call, probed or traced.

    Raises:
        Inapplicable: neither could be done; the message says what was missing.
    """
    raise Inapplicable("its attention could not be followed")
