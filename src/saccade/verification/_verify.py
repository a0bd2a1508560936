"""`saccade.verify`: which promises an implementation of attention keeps, and which it breaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .findings._finding import FAMILIES, Finding, Outcome
from .report._report import Report
from .subject._kinds import check as check_target, name_of
from .subject._reading import Hints, Promise, Reading

if TYPE_CHECKING:
    from .running._child import Limits
    from .running._job import CallDescription, FoundReading, Message, TargetUnusable
    from .subject._check import Check

Progress = Callable[[int, int, str], None]


def verify(
    target: Any,
    causal: bool | None = None,
    embed_dim: int | None = None,
    *,
    num_heads: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    how: Reading | Hints | Callable[..., Any] | str | None = None,
    promise: Promise | None = None,
    checks: Sequence[str | Check] | None = None,
    limits: Limits | None = None,
    isolated: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Run an implementation of attention and report which promises it breaks, with evidence and the fix.

    The target's code is run, as pytest runs tests: in a child process with limits of time and memory, where it may
    crash, hang, print or exit. Nothing is downloaded.

    Args:
        target: a function (q, k, v[, mask]) in any usual layout; an nn.Module of forward (x), (x, mask), (q, k, v) or
            (x, context), or its class; a transformers model; or a string, "path/to/file.py:Name" or "hf:DIR_OR_ID".
        causal: the author's promise: no output depends on a later input (True), or each may depend on all (False).
            None: the check decides, and anything between the two is an error.
        embed_dim: the width of its inputs, where it cannot be read from the target.
        num_heads: its heads, where they cannot be read from the target.
        arguments: of the constructor, where the target is a class.
        how: how to call it, where that is not found or found wrong: a `Hints`, a whole `Reading`, or an adapter, a
            function (target, query, key, value, mask=None), (target, x, mask=None) or (target, x, context, mask=None)
            that returns out or (out, weights). There query, key, value are (batch, heads, length, width) if the target
            is attention proper, x is (batch, length, width), and mask is boolean, True = attend; or a string that
            names such a function, "path/to/file.py:name".
        promise: more of the author's promises: window, positions, scale, the meaning of its mask.
        checks: which to run, by the names of the report's rows, as "scale" or "dtype and device"; "robustness" names
            its whole family, these three. None: all.
        limits: of time and memory for the child.
        isolated: False runs the target in this process, without limits: for debuggers.
        progress: called with how many checks of how many are done, and which comes next.

    Returns:
        The report. `report.ok` is False where a promise is broken or nothing of attention could be tested (then
        `report.untested` says why); `print(report)` shows everything.

    Raises:
        Undecided: (a ValueError) how to call it remains open; the message lists the candidates.
        TypeError: a target that cannot be called with tensors, or a `how` that is no way to call it.
        ValueError: an impossible argument, a string that names nothing, or a target that cannot reach a child.

    Example:
        >>> import torch, saccade
        >>> def unscaled(q, k, v):
        ...     return torch.softmax(q @ k.mT, dim=-1) @ v
        >>> saccade.verify(unscaled, causal=False, checks=["scale"], isolated=False)
        <Report on unscaled: unscaled breaks a promise of attention: scale.>
        >>> saccade.verify(torch.nn.functional.scaled_dot_product_attention, checks=["scale"], isolated=False).ok
        True
    """
    from .running._child import Limits
    from .running._job import Job

    given = promise or Promise()
    if causal is not None and given.causal is not None and causal != given.causal:
        raise ValueError(f"causal={causal} and promise.causal={given.causal} contradict each other; give one of them")
    if not isinstance(how, Hints | Reading | str | None) and not callable(how):
        raise TypeError(
            f"how: expected Hints, Reading, a function or a string that names one, got {type(how).__name__}"
        )
    if not isinstance(target, str):
        check_target(target)
    chosen = _chosen(checks)
    hints = how if isinstance(how, Hints) else Hints()
    hints = replace(hints, embed_dim=embed_dim or hints.embed_dim, num_heads=num_heads or hints.num_heads)
    job = Job(
        target,
        dict(arguments or {}),
        None if isinstance(how, Hints) else how,
        hints,
        replace(given, causal=given.causal if causal is None else causal),
        tuple(check.name for check in chosen),
    )
    for named in (target, how):
        if isinstance(named, str) and not named.startswith("hf:"):
            from .subject._load import split

            split(named)
    return _report(job, chosen, limits or Limits(), isolated, progress)


def assert_correct(target: Any, causal: bool | None = None, embed_dim: int | None = None, **options: Any) -> None:
    """Raise an error if `verify`, which takes the same arguments, finds an error or nothing that it can test.

    Raises:
        AssertionError: a promise is broken, or no attention was tested; its message is the report.

    Example:
        >>> import torch
        >>> from saccade.verification import assert_correct
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> assert_correct(attention, causal=False, checks=["scale", "softmax"], isolated=False)
        >>> def unscaled(q, k, v):
        ...     return torch.softmax(q @ k.mT, dim=-1) @ v
        >>> assert_correct(unscaled, causal=False, checks=["scale"], isolated=False)
        Traceback (most recent call last):
        ...
        AssertionError: ...
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    report = verify(target, causal, embed_dim, **options)
    if not report.ok:
        raise AssertionError(f"\n{report}")


def _chosen(names: Iterable[str | Check] | None) -> list[Check]:
    from .checks import CHECKS

    if names is None:
        return list(CHECKS)
    if isinstance(names, str):
        raise TypeError(f"checks: expected families in a list, got the string {names!r}")
    wanted = list(names)
    known = tuple(dict.fromkeys([*FAMILIES, *(check.name for check in CHECKS)]))
    unknown = [str(name) for name in wanted if name not in known and name not in CHECKS]
    if unknown or not wanted:
        raise ValueError(f"checks: {', '.join(unknown) or 'none'}: expected some of {', '.join(known)}")
    return [check for check in CHECKS if check in wanted or {check.name, check.family} & set(wanted)]


def _report(job: Any, checks: list[Check], limits: Limits, is_isolated: bool, progress: Progress | None) -> Report:
    from .running import _job
    from .running._causes import explained
    from .running._child import isolated

    start = time.perf_counter()
    messages: Iterable[Message] = isolated(job, limits) if is_isolated else _in_this_process(job)
    all_of_it = received(messages, progress, len(checks))
    called = all_of_it.call or _job.CallDescription("", ())
    looks = all_of_it.looks or _job.FoundReading(job.promise.causal, True)
    findings = all_of_it.findings
    if not looks.mixes and not any(finding.family == "causal-blindness" for finding in findings):
        findings.append(_no_attention())
    explained_findings, ended = explained(checks, findings, all_of_it.outcomes)
    promised, leaks = (
        job.promise.causal,
        any(finding.family == "causal-leak" for finding in explained_findings if finding.severity == "error"),
    )
    direction = () if promised is not None or looks.causal is None or leaks else (_job.DIRECTIONS[looks.causal],)
    return Report(
        job.target if isinstance(job.target, str) else name_of(job.target),
        called.called,
        called.assumed + direction,
        looks.causal if promised is None else promised,
        explained_findings,
        ended,
        time.perf_counter() - start,
        all_of_it.printed,
    )


class Received(NamedTuple):
    """The messages of a verification, sorted by kind."""

    call: CallDescription | None
    looks: FoundReading | None
    findings: list[Finding]
    outcomes: list[Outcome]
    printed: str
    start: float  # of its first call, by `time.perf_counter`


def received(messages: Iterable[Message], progress: Progress | None = None, total: int = 0) -> Received:
    """All messages. An error in the user's request is raised; `progress` is called as in `verify`."""
    from .running import _job

    start, printed = time.perf_counter(), ""
    call, looks = None, None
    findings: list[Finding] = []
    outcomes: list[Outcome] = []
    for message in messages:
        match message:
            case _job.RequestError():
                raise message.error from (_ChildTraceback(message.traceback) if message.traceback else None)
            case _job.StageBegun():
                start = time.perf_counter() if message.name == "calling" else start
                if progress is not None:
                    progress(len(outcomes), total, message.name)
            case _job.CallDescription():
                call = message
            case _job.FoundReading():
                looks = message
            case _job.CheckDone():
                outcomes.append(message.outcome)
                findings += message.findings
            case _job.TargetUnusable():
                findings.append(_nothing_works(message))
            case _job.Printed():
                printed = message.text
    findings += [_it_prints(printed)] if printed else []
    return Received(call, looks, findings, outcomes, printed, start)


_STAGES = {
    "loading": ("importing it", "Make `python FILE.py` work first: the import alone fails."),
    "calling": ("calling it", "Make a call of it work, or describe the call with options or an adapter."),
}


class _ChildTraceback(Exception):
    """The traceback of an error that was raised in the child: shown above the error itself."""

    def __str__(self) -> str:
        return f"in the child process\n{self.args[0]}"


def _in_this_process(job: Any) -> Iterable[Message]:
    threads = torch.get_num_threads()
    try:
        yield from job.work()
    finally:
        torch.set_num_threads(threads)


def _nothing_works(broken: TargetUnusable) -> Finding:
    from .running._run import raised

    doing, fix = _STAGES.get(broken.stage, ("starting", "Try it once more."))
    if broken.location is not None and broken.error.startswith(("NameError", "UnboundLocalError", "ImportError")):
        fix = "Import or define that name: this line fails in every call."
    finding = raised(None, broken.error, broken.location)
    special = not finding.message.startswith("A call of it raised ")  # memory, exit or a missing device
    message = finding.message if special else broken.error
    return replace(
        finding,
        check="robustness",
        message=f"No check could be run: {doing} failed. {message}",
        effect="Nothing can be tested until it can be constructed and called.",
        fix=finding.fix if special or ": it takes " in message else fix,
    )


def _it_prints(printed: str) -> Finding:
    lines = printed.strip().splitlines()
    first = " / ".join(line.strip()[:100] for line in lines[:3])
    return Finding(
        "robustness",
        "robustness",
        "note",
        f"It prints during a call: {first}{' ...' if len(lines) > 3 else ''}",
        "In training this prints at every step.",
        "Remove the print, or use logging.",
        {"lines": len(lines)},
    )


def _no_attention() -> Finding:
    return Finding(
        "causal-blindness",
        "causal-blindness",
        "warning",
        "No output depends on the input of another position",
        "If this is attention, each position sees only itself, and nothing "
        "about the sequence can be learned. A block whose last projection starts at zero looks like this, too.",
        "Name the class or function that holds the attention, or give its last projection other weights than zeros.",
        {"mixes": False},
    )
