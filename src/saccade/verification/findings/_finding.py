"""The results of a verification: findings, the outcome of each check, and the report. Plain data: it pickles and
becomes JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note", "n/a"]
FAMILIES = tuple(
    (
        "scale softmax causal-leak causal-blindness mask-meaning padding mixing order cache precision gradients "
        "dropout robustness weights model"
    ).split()
)


@dataclass(frozen=True)
class Location:
    """A line of the target's source.

    Example:
        >>> from saccade.verification import Location
        >>> Location("attention.py", 7, "weights = torch.softmax(scores, dim=1)", "forward").line
        7
    """

    path: str
    line: int
    code: str  # the line as it stands, stripped
    function: str = ""


@dataclass(frozen=True)
class Finding:
    """One broken promise, or a convention worth knowing, with its evidence.

    Example:
        >>> import torch, saccade
        >>> def unscaled(q, k, v):
        ...     return torch.softmax(q @ k.mT, dim=-1) @ v
        >>> report = saccade.verify(unscaled, causal=False, checks=["scale"], isolated=False)
        >>> finding = report.findings[0]
        >>> finding.check, finding.severity
        ('scale', 'error')
        >>> print(finding.message)
        Logits are 1 times q.k, where 0.25 is expected, one over the root of the head width, 16:
        they are not scaled at all.
    """

    check: str  # the check's name; of a stack, the probe's
    family: str  # one of FAMILIES; of a stack, the probe's name
    severity: Severity
    message: str  # what was seen, in a sentence: indices, sizes, numbers
    effect: str = ""  # what it does to training or inference
    fix: str = ""  # what to change, as a line of code where one says it
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers, words, lists of them
    location: Location | None = None
    example: tuple[tuple[int, ...], ...] = ()  # of a stack: the smallest documents, as token ids, that show it
    where: str = ""  # of a stack: the argument, or the layer, head and pair, where it begins

    @property
    def probe(self) -> str:
        """The probe that made it, where a stack was verified."""
        return self.check


class Inapplicable(Exception):
    """A check cannot be run on this target. The message gives the reason for the report.

    Example:
        >>> from saccade.verification import Inapplicable
        >>> str(Inapplicable("it has no dropout"))  # Outcome.reason of a check that raises it
        'it has no dropout'
    """


class Unmeasured(Inapplicable):
    """Raised by a check that applies to a target but could not measure it. The message gives the reason."""


class TargetError(Exception):
    """The target raised an error. `error` is its text, as "TypeError: ...", and `location` the deepest line of the
    target's own source.

    Example:
        >>> from saccade.verification import TargetError
        >>> error = TargetError("ValueError: heads must divide the width", None)
        >>> error.error
        'ValueError: heads must divide the width'
    """

    def __init__(self, error: str, location: Location | None):
        super().__init__(error)
        self.error, self.location = error, location


class UnreadableResult(TargetError):
    """A call succeeded, but its result does not fit the reading: the reading may be wrong, not the target."""


class Undecided(ValueError):
    """More than one way to call the target fits, or none. `candidates` are (reading in words, option that picks it).

    Example:
        >>> from saccade.verification import Undecided
        >>> error = Undecided("the layout is open", [("(batch, length, width)", "--layout BLD")])
        >>> print(error)
        the layout is open
          (batch, length, width): --layout BLD
    """

    def __init__(self, message: str, candidates: Iterable[tuple[str, str]] = ()):
        self.candidates = tuple(candidates)
        lines = [f"  {words}: {option}" for words, option in self.candidates]
        super().__init__("\n".join([message, *lines]))
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.candidates)


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Example:
        >>> import torch, saccade
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> outcome = saccade.verify(attention, checks=["scale"], isolated=False).outcomes[0]
        >>> outcome.name, outcome.status
        ('scale', 'passed')
        >>> print(outcome.promise)
        In every head, logits are q.k over the square root of the head width.
    """

    name: str
    family: str
    promise: str
    status: Literal["passed", "failed", "n/a"]  # failed: has an error; warnings and notes pass
    reason: str = ""  # of n/a
    seconds: float = 0.0
    measured: bool = True  # False: it applies, and could not be measured; its status is then n/a


@dataclass(frozen=True)
class StageBegun:
    """Message: the next stage, "loading", "calling", "looking", or the name of a check or probe."""

    name: str
    limited: bool = True  # whether it may take no longer than the limit


@dataclass(frozen=True)
class CheckDone:
    """Message: the outcome and findings of one check or probe."""

    outcome: Outcome
    findings: tuple[Finding, ...]
