"""Runs checks on a subject, one after the other, and says how each went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal

from ._finding import Check, Finding, Inapplicable, Outcome, TargetError
from ._subject import Subject


def run_checks(subject: Subject, checks: Sequence[Check]) -> Iterator[tuple[Outcome, list[Finding]]]:
    """Each check on a copy of its own, so that what one does to the target is not seen by the next."""
    for check in checks:
        start = time.perf_counter()
        findings, reason = _run(check, subject.fresh())
        failed = any(one.severity == "error" for one in findings)
        status: Literal["passed", "failed", "n/a"] = "n/a" if reason else "failed" if failed else "passed"
        yield Outcome(check.name, check.family, check.promise, status, reason, time.perf_counter() - start), findings


def _run(check: Check, subject: Subject) -> tuple[list[Finding], str]:
    findings: list[Finding] = []
    try:
        findings.extend(check.run(subject))
    except Inapplicable as reason:
        return findings, "" if findings else str(reason)
    except TargetError as error:
        findings.append(_raised(check, error))
    return findings, ""


def _raised(check: Check, error: TargetError) -> Finding:
    return Finding(
        check.name, check.family, "error", f"a call of it raised {error.error}",
        "Nothing more of this promise could be tested.", "Make the call work, or say with an option how it is called.",
        {"raised": error.error}, error.location,
    )  # fmt: skip
