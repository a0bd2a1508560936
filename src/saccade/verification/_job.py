"""One verification as a stream of messages: loading, discovering, and each check. The same in this process as in a
child."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._finding import Check, Finding, Inapplicable, Location, Outcome, TargetError, Undecided
from ._influence import dependence, direction_of, off_diagonal
from ._locate import is_own, line_of, location_of
from ._reading import Hints, Promise, Reading
from ._run import run_check
from ._subject import Subject
from ._words import call_in_words


@dataclass(frozen=True)
class Job:
    """What to verify. It pickles where `target` and `how` do."""

    target: Any  # the object, or "path/to/file.py:Name", or "hf:DIR_OR_ID"
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    how: Reading | Callable[..., Any] | str | None = None  # a string names an adapter in a file
    hints: Hints = field(default_factory=Hints)
    promise: Promise = field(default_factory=Promise)
    names: tuple[str, ...] = ()  # of the checks to run


@dataclass(frozen=True)
class Stage:
    """What is about to be done: "loading", "calling", or the name of a check."""

    name: str


@dataclass(frozen=True)
class Called:
    """How the target is called, as `Report` tells it."""

    called: str
    assumed: tuple[str, ...]
    causal: bool | None
    mixes: bool = True  # whether any output depends on another position's input


@dataclass(frozen=True)
class Done:
    """How one check went."""

    outcome: Outcome
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Broken:
    """The target cannot even be made or called: nothing more comes."""

    error: str
    location: Location | None
    stage: str


@dataclass(frozen=True)
class Refused:
    """What the user asked for cannot be done: an error to raise."""

    error: Exception
    traceback: str = ""  # of the process that it happened in


DIRECTIONS = (
    "it is bidirectional: every output depends on every input (otherwise --causal)",
    "it is causal: no output depends on a later input (otherwise --bidirectional)",
)
Message = Stage | Called | Done | Broken | Refused


def work(job: Job) -> Iterator[Message]:
    """Do the job. Warnings of the target's are not shown: the report is what there is to read."""
    from ._discover import discover

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stage = "loading"
        try:
            yield Stage(stage)
            target = _loaded(job.target)
            how = _loaded(job.how)
            stage = "calling"
            yield Stage(stage)
            subject = discover(target, job.hints, job.promise, how, job.arguments)
            yield _called(subject)
        except Undecided as undecided:
            yield Refused(undecided)
            return
        except TargetError as error:
            yield Broken(error.error, error.location, stage)
            return
        except (Exception, SystemExit) as error:
            yield _failed(error, stage)
            return
        for check in chosen(job.names):
            yield Stage(check.name)
            yield Done(*run_check(check, subject))


def chosen(names: tuple[str, ...]) -> list[Check]:
    from .checks import CHECKS

    return [check for check in CHECKS if check.name in names]


def _loaded(named: Any) -> Any:
    if not isinstance(named, str):
        return named
    from ._load import load

    return load(named)


def _called(subject: Subject) -> Called:
    causal, assumed, mixes = subject.promise.causal, subject.reading.assumed, True
    with contextlib.suppress(Inapplicable, TargetError):
        sizes = dependence(subject, 7)
        mixes = bool(off_diagonal(sizes > 0).any())
        if causal is None and mixes:
            causal = {"causal": True, "bidirectional": False}.get(direction_of(sizes))
            assumed = assumed if causal is None else (*assumed, DIRECTIONS[causal])
    return Called(call_in_words(subject), assumed, causal, mixes)


def _failed(error: BaseException, stage: str) -> Broken | Refused:
    """What came through the target's own lines is its fault; the rest is for the user of `verify` or is ours."""
    location = location_of(error)
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        location = line_of(error.filename, error.lineno or 0, "")
    if location is None and isinstance(error, Exception):
        # an exception of another package may not pickle
        known = isinstance(error, Undecided) or type(error).__module__ == "builtins"
        lines = "".join(traceback.format_exception(error))
        return Refused(error if known else RuntimeError(f"{type(error).__name__}: {error}"), lines)
    words = f"exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return Broken(" ".join(words.split())[:500], location, stage)
