"""Reports as JSON: plain values with names that stay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._finding import Finding, Location

if TYPE_CHECKING:
    from ._finding import Report

FORMAT = 1  # counts changes of the names and meanings below


def as_json(report: Report) -> dict[str, Any]:
    """A report as JSON values.

    format, target, ok, called, assumed, causal, seconds, printed, counts of errors, warnings and notes;
    findings: check, family, severity, message, effect, mend, evidence, location (path, line, code, function; or null);
    checks: name, family, promise, status (passed, failed, n/a), reason, seconds.
    """
    counts = {kind: sum(one.severity == kind for one in report.findings) for kind in ("error", "warning", "note")}
    return {
        "format": FORMAT,
        "target": report.target,
        "ok": report.ok,
        "called": report.called,
        "assumed": list(report.assumed),
        "causal": report.causal,
        "seconds": round(report.seconds, 3),
        "errors": counts["error"],
        "warnings": counts["warning"],
        "notes": counts["note"],
        "findings": [_finding(one) for one in report.findings],
        "checks": [
            {**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 3)} for outcome in report.outcomes
        ],
        "printed": report.printed,
    }


def plain(value: Any) -> Any:
    """`value` as JSON has it: tensors and arrays as lists, numbers that JSON lacks and all else as words."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    if isinstance(value, Location):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _finding(finding: Finding) -> dict[str, Any]:
    location = finding.location
    return {
        "check": finding.check,
        "family": finding.family,
        "severity": finding.severity,
        "message": finding.message,
        "effect": finding.effect,
        "mend": finding.mend,
        "evidence": plain(finding.evidence),
        "location": None if location is None else dataclasses.asdict(location),
    }
