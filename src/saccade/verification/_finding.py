"""What a verification gives: findings, how each check went, and the report of them all. Plain data: it pickles and
becomes JSON as it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ._subject import Subject

Severity = Literal["error", "warning", "note", "n/a"]
FAMILIES = (
    "scale", "softmax", "causal-leak", "causal-blindness", "mask-meaning", "padding", "mixing", "order", "cache",
    "precision", "gradients", "dropout", "robustness", "weights", "model",
)  # fmt: skip


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
    mend: str = ""  # what to change, as a line of code where one says it
    evidence: Mapping[str, Any] = field(default_factory=dict)  # numbers, words, lists of them
    location: Location | None = None


@dataclass(frozen=True)
class Check:
    """A promise, and how it is put to the test.

    `run` yields findings; it yields none where the promise is kept and raises `Inapplicable` where it cannot be asked.
    """

    name: str
    family: str
    promise: str  # "Logits are q.k divided by the square root of the head width"
    how: str  # how it is tested, a sentence
    why: str  # what it costs when broken, a sentence
    run: Callable[[Subject], Iterable[Finding]]
    # Errors of these families, when there, explain errors of this one: they are then told as a note of what follows.
    follows_from: tuple[str, ...] = ()


class Inapplicable(Exception):
    """A check cannot be put to this target; the message says why, for the report."""


class TargetError(Exception):
    """The target raised. `error` is what, as "TypeError: ...", `location` the deepest line of its own source."""

    def __init__(self, error: str, location: Location | None):
        super().__init__(error)
        self.error, self.location = error, location


class Unreadable(TargetError):
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


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    `ok` is whether attention was put to the test and no error found; warnings and notes do not count. `str(report)`,
    and so `print`, give the table.
    """

    target: str  # as the user named it
    called: str  # how it is called, in words: "forward(x, mask) with x (batch, length, width)"
    assumed: tuple[str, ...]  # what was found by trying and not told
    causal: bool | None  # promised or found
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]
    seconds: float = 0.0
    printed: str = ""  # what the target wrote to its standard output and error

    @property
    def ok(self) -> bool:
        return not self.errors and not self.untested

    @property
    def untested(self) -> str:
        """Why the absence of errors would say too little, in words; "" where it does not."""
        broken_off = sum("broke off" in one.reason for one in self.outcomes)
        if broken_off:
            return f"{broken_off} check{'s' if broken_off > 1 else ''} broke off"
        if all(one.status == "n/a" for one in self.outcomes):
            return "no check applies"
        return "no attention was seen" if any(one.evidence.get("mixes") is False for one in self.findings) else ""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if one.severity == "error")

    def __repr__(self) -> str:
        from ._show import verdict

        return f"<Report on {self.target}: {verdict(self)}>"

    def __str__(self) -> str:
        from ._show import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from ._page import as_fragment

        return as_fragment(self)
