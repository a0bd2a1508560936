"""Runs the probes one by one: what one of them raises is a finding, and the others go on.

`broken` reads a few tokens, which show in about a second whether a stack still keeps the promises that it kept before.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack

import torch

from ..findings._finding import CheckDone, Finding, Inapplicable, StageBegun, TargetError, Unmeasured
from ..findings._locate import error_in_words
from ..findings._results import done
from ..findings._words import MEMORY_WORDS
from ._bounds import Measure, NoDropout, exact, measured
from ._comparing import Comparison
from ._documents import drawn, exchanged
from ._opened import Given, opened
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


def broken(given: Given, kept: Collection[str]) -> bool:
    """Whether a promise of one of these probes seems to be broken. The probes have the proof.

    Two documents are packed, or padded, and compared with themselves alone; one is called twice; its last token
    changes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stack = opened(given)
            with exact(stack):
                return any(_differences(stack, kept))
        except (Inapplicable, TargetError):
            return True


def _differences(stack: Stack, kept: Collection[str]) -> Iterator[bool]:
    documents = drawn(stack.vocabulary, [stack.length(3), stack.length(2 if stack.takes_padding else 3)])
    document = stack.batch(documents[:1])
    first = stack.run(document)
    if "determinism" in kept:
        yield not torch.equal(first.nan_to_num(), stack.run(document).nan_to_num())
    measure = measured(stack)
    if "causality" in kept and stack.promises.causal is not False:
        last = len(documents[0]) - 1
        changed = stack.run(stack.batch([exchanged(documents[0], stack.vocabulary, last)]))
        yield measure.compare(changed[0, :last], first[0, :last]) is not None
    for name, make in (("packing", stack.pack), ("batch", stack.batch)):
        if name in kept and make is not None:
            yield Comparison(stack, measure, make).worst(documents) is not None
