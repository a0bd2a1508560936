"""Runs the probes one by one: what one of them raises is a finding, and the others go on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ..findings._finding import CheckDone, Finding, Inapplicable, StageBegun, TargetError, Unmeasured
from ..findings._locate import error_in_words
from ..findings._results import done
from ..findings._words import MEMORY_WORDS
from ._bounds import Measure, NoDropout, exact, measured
from ._probe import Probe
from ._stack import Stack


def probed(probes: Sequence[Probe], stack: Stack) -> Iterator[StageBegun | CheckDone]:
    """Run the probes in float64 where that changes no path. What float64 alone may have caused is run again without."""
    again: list[Probe] = []
    for message in _run(probes, stack, cast=True):
        if isinstance(message, CheckDone) and any(map(_depends_on_dtype, message.findings)):
            again += [probe for probe in probes if probe.name == message.outcome.name]
        else:
            yield message
    yield from _run(again, stack, cast=False)


def _run(probes: Sequence[Probe], stack: Stack, *, cast: bool) -> Iterator[StageBegun | CheckDone]:
    """Run the probes one by one. Random numbers of a model in eval mode must not move the other probes."""
    if not probes:
        return
    with exact(stack, cast=cast), ExitStack() as quiet:
        measure = measured(stack)
        for probe in probes:
            yield StageBegun(probe.name)
            start = time.perf_counter()
            found, reason, is_measured = _findings(probe, stack, measure)
            yield done(probe, found, reason, time.perf_counter() - start, measured=is_measured)
            if found and probe.name == "determinism":
                quiet.enter_context(NoDropout())
                measure = measured(stack)


def _depends_on_dtype(finding: Finding) -> bool:
    """Whether float64 alone may be the cause: masks of its least number are -inf in a softmax of float32, and code
    may name a dtype."""
    return "raised" in finding.evidence or finding.evidence.get("largest_difference") in ("inf", float("inf"))


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
        if any(words in error.error.lower() for words in MEMORY_WORDS):  # copies and gradients of ours need it
            return findings, "not measured: it needs more memory than there is", bool(findings)
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
