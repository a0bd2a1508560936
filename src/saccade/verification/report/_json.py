"""Reports as JSON: plain values with names that stay."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..findings._results import Results
from ..findings._words import plain

FORMAT = 1  # counts changes of the names and meanings below


def as_json(report: Results) -> dict[str, Any]:
    """A report as JSON values.

    format: 1; a change of the names or meanings below counts it up.
    target: as it was named.
    ok: true where attention was put to the test and no error found: exit status 0.
    untested: why the absence of errors would say too little ("no attention was seen", "no check applies", "1 check
        broke off"), else "".
    called: how it is called, in words; "" where that was not found.
    assumed: a list of inferred settings, each with the option that changes it.
    causal: true or false as promised or else found, null where it is neither.
    seconds: all that it took.
    errors, warnings, notes: how many findings there are of each severity.
    findings: a list, errors first:
        check, family: the name of the check that found it, and its family; several checks may be of one family.
        severity: "error", "warning" or "note".
        message, effect, fix: what was seen, what it does to training or inference, and what to change, code where a
            line of it says that; effect and fix may be "".
        evidence: an object of numbers, words, and lists of them; its names depend on the check.
        example: of a stack, the smallest documents that show it, each a list of token ids; else [].
        where: of a stack, the argument, or the layer, head and pair, where it begins; else "".
        location: path (absolute), line (from 1), code (that line) and function of the target's source, or null.
    checks: a list, one for each check that was run, in their order:
        name, family, promise: what it asks, in a sentence.
        status: "passed" (warnings and notes pass), "failed", or "n/a" where it could not be asked.
        measured: False where it applies and could not be measured; its status is then "n/a".
        reason: why it is "n/a" or where it stopped, else "".
        seconds: what this check took.
    printed: what the target wrote to standard output and error, at most 64 KiB.

    Where `saccade verify --json` could not decide how to call the target (exit status 2), it prints another object:
    undecided (what is open) and candidates, a list of reading and option, the option that decides for that reading.

    Example:
        >>> import torch, saccade
        >>> report = saccade.verify(torch.nn.functional.scaled_dot_product_attention, checks=["scale"], isolated=False)
        >>> found = saccade.verification.as_json(report)
        >>> found["ok"], found["errors"], found["checks"][0]["status"]
        (True, 0, 'passed')
    """
    counts = {
        kind: sum(finding.severity == kind for finding in report.findings) for kind in ("error", "warning", "note")
    }
    return {
        "format": FORMAT,
        "target": report.target,
        "ok": report.ok,
        "untested": report.untested,
        "called": report.called,
        "assumed": list(report.assumed),
        "causal": report.causal,
        "seconds": round(report.seconds, 3),
        "errors": counts["error"],
        "warnings": counts["warning"],
        "notes": counts["note"],
        "findings": [
            dataclasses.asdict(dataclasses.replace(finding, evidence=plain(finding.evidence)))
            for finding in report.findings
        ],
        "checks": [
            {**dataclasses.asdict(outcome), "seconds": round(outcome.seconds, 3)} for outcome in report.outcomes
        ],
        "printed": report.printed,
    }
