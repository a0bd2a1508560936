"""Runs a check on a subject; errors of the target become findings."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from ..findings._finding import CheckDone, Finding, Inapplicable, Location, Severity, TargetError, Unmeasured
from ..findings._locate import error_in_words, location_of
from ..findings._results import done
from ..findings._words import GPU_WORDS, MEMORY_WORDS, TRIANGLE
from ..subject._check import Check
from ..subject._shortened import size_of
from ..subject._subject import Subject
from ..subject._variants import CallVariant


def run_check(check: Check, subject: Subject, others: Sequence[CallVariant] = ()) -> CheckDone:
    """Run one check on a separate copy, then on `others`, other calls. Every exception except Ctrl-C becomes a
    finding."""
    start = time.perf_counter()
    found, reason, measured = _run(check, subject)
    found += _of_others(check, found, others)
    return done(check, found, reason, time.perf_counter() - start, measured=measured)


def _run(check: Check, subject: Subject) -> tuple[list[Finding], str, bool]:
    """The findings of a check, why it stopped early, and whether it measured its promise; our own limits are a finding
    only for small models."""
    findings, reason, measured = _run_to_the_end(check, subject)
    own = [finding for finding in findings if not _by_our_limit(finding, subject)]
    short = len(own) < len(findings) or any(words in reason.lower() for words in MEMORY_WORDS)
    return own, _NO_MEMORY if short else reason, measured and not short


NOT_SMALL = 16 * 2**20  # bytes of parameters: copies and gradients of these count beside the limit on memory
_NO_MEMORY = "not measured: it needs more memory than the limit for a model of this size (--memory-limit, limits=)"
_OVERSIZED = 2**30  # bytes in one request, for inputs of some tokens


def _by_our_limit(finding: Finding, subject: Subject) -> bool:
    """Whether a call, or a copy made here, exceeded the memory limit, other than by a single oversized request."""
    words = str(finding.evidence.get("raised", finding.message)).lower()
    if finding.severity == "note" or not any(
        known in words for known in (*MEMORY_WORDS, "could not create a primitive")
    ):
        return False
    asked = re.search(r"tried to allocate (\d+) bytes", words)
    return size_of(subject.target) >= NOT_SMALL and not (asked and int(asked[1]) >= _OVERSIZED)


def _run_to_the_end(check: Check, subject: Subject) -> tuple[list[Finding], str, bool]:
    """Findings, the reason for stopping early ("" if none), and whether the check measured its promise."""
    findings: list[Finding] = []
    only = subject.reading.only_length
    if only is not None and check.name not in _AT_ONE_LENGTH:
        return [], f"it takes {only} positions and no other number, and this needs other lengths", False
    try:
        findings.extend(check.run(_copied(subject)))
    except Inapplicable as reason:
        return findings, "" if findings else str(reason), bool(findings) or not isinstance(reason, Unmeasured)
    except TargetError as error:
        return [*findings, raised(check, error.error, error.location)], "a call of it raised an error", True
    except SystemExit as error:
        return [*findings, raised(check, f"exit({error.code!r})", location_of(error))], "it called exit", True
    except Exception as error:
        return [*findings, _broke_off(check, error)], f"the check broke off with {type(error).__name__}", False
    return findings, "", True


# These need no second length. What compares lengths would accuse a target that takes one alone.
_AT_ONE_LENGTH = (
    *("scale", "softmax", "causal-leak", "mixing", "precision", "gradients", "dropout", "dtype and device", "weights"),
)
# These give masks of their own, or take the plain call alone.
_ONCE = ("mask-meaning", "padding", "cache", "model", "compile", "weights")


def _of_others(check: Check, findings: Sequence[Finding], others: Sequence[CallVariant]) -> list[Finding]:
    """Errors of the first additional call that has errors, if the plain call has none. If the purpose of a flag is
    unknown, they become warnings: the flag may disable on purpose what a check requires."""
    if any(finding.severity == "error" for finding in findings):
        return []
    for other in others:
        whole = other.subject.form == "tokens"
        if check.name in _ONCE and not (whole and check.name == "model"):
            continue
        errors = [finding for finding in _run(check, other.subject)[0] if finding.severity == "error"]
        if check.name == ("model" if whole else "robustness") and other.harmless and not other.named:
            errors.append(_differs(check, other))
        if errors:
            severity: Severity = "error" if other.harmless else "warning"
            message, evidence = f"With {other.words}: {errors[0].message}", {**errors[0].evidence, "call": other.words}
            return [replace(errors[0], severity=severity, message=message, evidence=evidence)]
    return []


def _differs(check: Check, other: CallVariant) -> Finding:
    return Finding(
        check.name,
        check.family,
        "error",
        f"The output changes by {other.by:.3g} (of {other.size:.3g}) {other.where}, though this must not change what "
        "is computed",
        "Results depend on how it is called: what is tested in one way is used in another.",
        "Compute both paths from the same scores and the same masks.",
        {"call": other.words, "largest_difference": other.by, "where": other.where},
    )


def _copied(subject: Subject) -> Subject:
    """A copy to change, or the subject itself if it cannot be copied: a child process has its own copy already."""
    try:
        return subject.fresh()
    except Inapplicable:
        return subject


_KNOWN = (  # what errors say, and what a finding does: message, effect and fix
    (
        MEMORY_WORDS,
        "It requested more memory than the limit allows",
        "For inputs this small, the cause is an oversized buffer or a wrong shape.",
        "Size buffers by the input, or raise the limit (--memory-limit, limits=) if so much is intended.",
    ),
    (
        GPU_WORDS,
        "It needs a device that this machine lacks",
        "A hard-coded device works on one machine and breaks on every other, and on models split over devices.",
        "torch.arange(length, device=x.device)  # take the device from the input, not .cuda()",
    ),
)


def raised(check: Check | None, error: str, location: Location | None) -> Finding:
    """A finding about an error that a target raised; memory, exit and a missing GPU belong to robustness in every
    check."""
    name = "robustness" if check is None else check.name
    lowered, evidence = error.lower(), {"raised": error}
    if lowered.startswith("exit("):
        return Finding(
            name,
            "robustness",
            "error",
            f"It called {error}, which would have ended your program",
            "A library function that exits takes the training run with it, without a traceback.",
            "raise ValueError(...)  # instead of exit, so that the caller can handle it",
            evidence,
            location,
        )
    for known, message, effect, fix in _KNOWN:
        if any(words in lowered for words in known):
            return Finding(name, "robustness", "error", f"{message}: {error}", effect, fix, evidence, location)
    fix = "Make the call work, or describe it with an option."
    if "where its learned positions end" in lowered:
        fix = "Build it for 7 positions or more (--arg NAME=64): the checks need that many."
    elif ": it takes at most" in lowered or "where (length, length) is expected" in lowered:
        fix = f"mask = {TRIANGLE}  # L = x.shape[1]; a buffer is max_length wide"
    elif ": it takes a batch of" in lowered:
        fix = "batch, length, width = x.shape  # sizes from the input; no number in view and reshape"
    family, effect = "robustness" if check is None else check.family, "Nothing more of this promise could be tested."
    return Finding(name, family, "error", f"A call of it raised {error}", effect, fix, evidence, location)


def _broke_off(check: Check, error: Exception) -> Finding:
    """The finding for an error outside of the target's calls: about the target if a line of its code raised it,
    otherwise about Saccade."""
    words = error_in_words(error)
    location = location_of(error)
    if location is not None or any(known in words.lower() for known in MEMORY_WORDS):
        return raised(check, words, location)
    return Finding(
        check.name,
        check.family,
        "warning",
        f"This check broke off with {words}",
        "This promise could not be fully tested; this is not a finding about your code.",
        "A defect of Saccade: please report it with the target.",
        {"traceback": _last_frames(error)},
    )


def _last_frames(error: Exception) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
