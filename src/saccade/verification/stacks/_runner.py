"""Runs the probes one by one: what one of them raises is a finding, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..findings._finding import Finding, Inapplicable, Outcome, TargetError, Unmeasured
from ..findings._locate import error_in_words
from ..findings._words import plain
from ._bounds import Measure
from ._probe import Probe
from ._stack import Stack


def run(probes: Iterable[Probe], stack: Stack, measure: Measure) -> Iterator[tuple[Outcome, list[Finding]]]:
    for probe in probes:
        start = time.perf_counter()
        findings, reason, is_measured = _findings(probe, stack, measure)
        findings = [replace(finding, evidence=plain(finding.evidence)) for finding in findings]
        failed = any(finding.severity == "error" for finding in findings)
        status = "failed" if failed else "n/a" if reason else "passed"
        outcome = Outcome(probe.name, probe.name, probe.promise, status, reason, measured=is_measured)  # type: ignore[arg-type]
        yield replace(outcome, seconds=time.perf_counter() - start), findings


def _findings(probe: Probe, stack: Stack, measure: Measure) -> tuple[list[Finding], str, bool]:
    """(findings, why the probe ended early or "", whether it measured its promise)."""
    findings: list[Finding] = []
    try:
        findings.extend(probe.run(stack, measure))
    except Unmeasured as reason:
        return findings, str(reason), bool(findings)
    except Inapplicable as reason:
        return findings, "" if findings else str(reason), True
    except TargetError as error:
        return [*findings, raised(probe.name, error)], "a call of it raised an error", True
    except Exception as error:  # of the user's own functions, or ours: the other probes go on
        own = Finding(
            probe.name,
            probe.name,
            "warning",
            f"The probe broke off with {error_in_words(error)}",
            "This promise was not tested.",
            "Call the part by hand with a few documents; if that works, this is a defect of Saccade.",
        )
        return [*findings, own], f"the probe broke off with {type(error).__name__}", False
    hidden = measure.hides if probe.rounds and not findings else ""
    return findings, hidden, not hidden


def raised(name: str, error: TargetError) -> Finding:
    return Finding(
        name,
        name,
        "error",
        f"The stack raised {error.error}",
        "This path works for some inputs and not for others.",
        "Make the call work, or leave out the argument that describes this path.",
        {"raised": error.error},
        error.location,
        where=name,
    )
