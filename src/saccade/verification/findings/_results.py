"""All that `verify` found, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ._finding import CheckDone, Finding, Outcome
from ._words import plain


def done(
    part: Any, findings: Iterable[Finding], reason: str = "", seconds: float = 0.0, *, measured: bool = True
) -> CheckDone:
    """The message about a check or probe with these findings. `reason`: why it stopped early, or was not run."""
    kept = tuple(replace(finding, evidence=plain(finding.evidence)) for finding in findings)
    failed = any(finding.severity == "error" for finding in kept)
    status: Any = "failed" if failed else "n/a" if reason else "passed"
    return CheckDone(Outcome(part.name, part.family, part.promise, status, reason, seconds, measured), kept)


@dataclass(frozen=True)
class Results:
    """The result of `verify`; see `Report`."""

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
        """The reason why a report without errors is not sufficient, in words; "" if it is sufficient."""
        broken_off = sum("broke off" in outcome.reason for outcome in self.outcomes)
        if broken_off:
            return f"{broken_off} check{'s' if broken_off > 1 else ''} broke off"
        if all(outcome.status == "n/a" for outcome in self.outcomes):
            return "no check applies"
        return (
            "no attention was seen" if any(finding.evidence.get("mixes") is False for finding in self.findings) else ""
        )

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")
