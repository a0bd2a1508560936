"""What a verification gives: findings, how each check went, and the report of them all. Plain data: it pickles and
becomes JSON as it stands."""

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
    """A line of the target's source."""

    path: str
    line: int
    code: str  # the line as it stands, stripped
    function: str = ""


@dataclass(frozen=True)
class Finding:
    """One broken promise (or a convention worth knowing), with what shows it."""

    check: str  # the check's name
    family: str  # one of FAMILIES
    severity: Severity
    message: str  # what was seen, in a sentence: indices, sizes, numbers
    effect: str = ""  # what it does to training or inference
    fix: str = ""  # what to change, as a line of code where one says it
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers, words, lists of them
    location: Location | None = None


class Inapplicable(Exception):
    """A check cannot be put to this target; the message says why, for the report."""


class TargetError(Exception):
    """The target raised. `error` is what, as "TypeError: ...", `location` the deepest line of its own source."""

    def __init__(self, error: str, location: Location | None):
        super().__init__(error)
        self.error, self.location = error, location


class UnreadableResult(TargetError):
    """A call ended, and what it returned is not what the reading says: the reading may be wrong, and not the target."""


class Undecided(ValueError):
    """More than one way to call the target fits, or none. `candidates` are (reading in words, option that picks it)."""

    def __init__(self, message: str, candidates: Iterable[tuple[str, str]] = ()):
        self.candidates = tuple(candidates)
        lines = [f"  {words}: {option}" for words, option in self.candidates]
        super().__init__("\n".join([message, *lines]))
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.candidates)


@dataclass(frozen=True)
class Outcome:
    """How one check went."""

    name: str
    family: str
    promise: str
    status: Literal["passed", "failed", "n/a"]  # failed: has an error; warnings and notes pass
    reason: str = ""  # of n/a
    seconds: float = 0.0
