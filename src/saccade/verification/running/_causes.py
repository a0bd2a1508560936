"""One fault often breaks several promises. Here consequences of another finding become notes, an error of the target is
reported once, and findings are sorted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...support._numbers import joined
from ..findings._finding import Finding, Outcome
from ..subject._check import Check

_SIZES = {"batch", "length"}
_MASKS = ("mask-meaning", "padding")
_SEVERITIES = ("error", "warning", "note", "n/a")


def explained(
    checks: Sequence[Check], findings: Sequence[Finding], outcomes: Sequence[Outcome]
) -> tuple[tuple[Finding, ...], tuple[Outcome, ...]]:
    """Sorted findings, in which consequences of another finding become notes, and outcomes that name their causes."""
    once = _without_repeats(findings)
    # what follows from one finding is no cause itself
    once = [_as_note(finding, by) if (by := _follows(finding, once)) else finding for finding in once]
    causes = _causes(checks, once)
    sized = any(_is_of_size(finding) for finding in once)
    why = [("robustness",) if sized and _only_stopped(finding) else causes.get(finding.check, ()) for finding in once]
    demoted = [
        _as_note(finding, by)
        if by and _is_error(finding) and not {"dtype", "raised"} <= set(finding.evidence)
        else finding
        for finding, by in zip(once, why, strict=True)
    ]
    return _sorted(checks, demoted), tuple(_outcome(outcome, demoted, findings) for outcome in outcomes)


def _sorted(checks: Sequence[Check], findings: Sequence[Finding]) -> tuple[Finding, ...]:
    order = {check.name: at for at, check in enumerate(checks)}
    return tuple(
        sorted(
            findings, key=lambda finding: (_SEVERITIES.index(finding.severity), order.get(finding.check, len(order)))
        )
    )


# The same error of the target's in several checks


def _without_repeats(findings: Sequence[Finding]) -> list[Finding]:
    """Findings without repeats: an error that the target raised at one place is kept once, from the check that looks
    for it or else from the first."""
    kept: list[Finding] = []
    for finding in findings:
        same = next((at for at, other in enumerate(kept) if _same(finding, other)), None)
        if same is None:
            kept.append(finding)
        elif _only_raised(kept[same]) and not _only_raised(finding):
            kept[same] = finding
    return kept


def _same(finding: Finding, other: Finding) -> bool:
    if finding.message == other.message and "traceback" in finding.evidence:
        return True  # the same defect of ours in two checks
    if not (_only_raised(finding) or _only_raised(other)) or finding.severity != "error" or other.severity != "error":
        return False
    return _error_kind(finding) is not None and _error_kind(finding) == _error_kind(other)


def _only_raised(finding: Finding) -> bool:
    """Whether a finding reports only that a call failed; see `_run.raised`."""
    return set(finding.evidence) == {"raised"} or "ended" in finding.evidence


def _is_of_size(finding: Finding) -> bool:
    """Whether a finding reports that calls of another size raise an error, at any line."""
    return finding.severity == "error" and "raised" in finding.evidence and bool(_SIZES & set(finding.evidence))


def _only_stopped(finding: Finding) -> bool:
    return finding.severity == "error" and finding.family != "robustness" and set(finding.evidence) == {"raised"}


def _error_kind(finding: Finding) -> tuple[str, ...] | None:
    """The kind of the error and its place; without a place its words, with sizes left out."""
    if "ended" in finding.evidence:
        words = f"{finding.evidence['ended']} {finding.evidence.get('number')}"
    elif "raised" in finding.evidence:
        words = str(finding.evidence["raised"])
    else:
        return None
    if finding.location is not None:
        return words.split(":")[0], finding.location.path, str(finding.location.line)
    return (re.sub(r"\d+", "#", words),)


# What follows from another finding


def _causes(checks: Sequence[Check], findings: Sequence[Finding]) -> dict[str, tuple[str, ...]]:
    """For each check with errors, the checks whose errors explain them, directly or not. If two explain each other, the
    first in the order of the checks is the cause."""
    broken = [
        check for check in checks if any(finding.check == check.name and _is_error(finding) for finding in findings)
    ]
    families = {
        check.name: {finding.family for finding in findings if finding.check == check.name and _is_error(finding)}
        for check in broken
    }
    near = {
        check.name: [
            other.name for other in broken if other is not check and families[other.name] & set(check.follows_from)
        ]
        for check in broken
    }
    far = {name: _reachable(name, near) for name in near}
    order = list(near)
    return {
        name: tuple(
            other
            for other in order
            if other in far[name] and (name not in far[other] or order.index(other) < order.index(name))
        )
        for name in near
    }


def _follows(finding: Finding, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Names of the checks whose findings explain this finding. Weights that ignore queries and keys leave the
    projections unused; so does a mask that hides everything, and if it is filled with -inf, no output is finite. A
    misread mask explains only findings of calls with that mask."""
    unused = finding.family == "mixing" and "channels" in finding.evidence
    masked = "mask" in str(finding.evidence.get("call", "")) and finding.family not in _MASKS
    nothing = finding.evidence.get("finite") == 0 or finding.evidence.get("mixes") is False
    return tuple(
        other.check
        for other in findings
        if _is_error(other)
        and (
            (unused and other.evidence.get("depends_not_on") == "both")
            or (masked and other.family in _MASKS)
            or ((unused or nothing) and other.evidence.get("hides_all"))
        )
    )


def _is_error(finding: Finding) -> bool:
    return finding.severity == "error"


def _reachable(name: str, near: dict[str, list[str]]) -> set[str]:
    reached: set[str] = set()
    left = [*near[name]]
    while left:
        check = left.pop()
        if check not in reached:
            reached.add(check)
            left += near[check]
    return reached - {name}


def _as_note(finding: Finding, causes: tuple[str, ...]) -> Finding:
    message = f"{finding.message.rstrip('.')}. Probably follows from {joined(causes)}."
    return replace(finding, severity="note", message=message, fix="")  # what fixes the cause fixes it


def _outcome(outcome: Outcome, findings: Sequence[Finding], before: Sequence[Finding]) -> Outcome:
    """The outcome of a check. It does not count as failed if its error was reported elsewhere, or follows from
    another."""
    if outcome.status != "failed" or any(finding.check == outcome.name and _is_error(finding) for finding in findings):
        return outcome
    if any(finding.check == outcome.name for finding in findings):
        return replace(outcome, status="n/a", reason="what it found probably follows from another error")
    first = next(finding for finding in before if finding.check == outcome.name and _is_error(finding))
    same = next((finding for finding in findings if _same(finding, first)), None)
    return replace(
        outcome, status="n/a", reason=f"stopped by the error reported under {same.check if same else 'another'}"
    )
