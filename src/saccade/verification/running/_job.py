"""One verification as a stream of messages: loading, discovering, and each check. The same in this process as in a
child."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..findings._finding import CheckDone as CheckDone, Location, StageBegun as StageBegun, TargetError, Undecided
from ..findings._locate import error_in_words, is_own, line_of, location_of
from ..subject._check import Check
from ..subject._influence import direction_of, off_diagonal, own_dependence
from ..subject._reading import Hints, Promise, Reading
from ..subject._shortened import size_of
from ..subject._subject import Subject
from ..subject._variants import CallVariant, variants
from ..subject._words import call_in_words
from ._run import run_check


@dataclass(frozen=True)
class Job:
    """The target and how to verify it. It pickles if `target` and `how` do."""

    target: Any  # the object, or "path/to/file.py:Name", or "hf:DIR_OR_ID"
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    how: Reading | Callable[..., Any] | str | None = None  # a string names an adapter in a file
    hints: Hints = field(default_factory=Hints)
    promise: Promise = field(default_factory=Promise)
    names: tuple[str, ...] = ()  # of the checks to run
    looks: bool = True  # whether to find out which way it looks

    @property
    def parts(self) -> list[Check]:
        """The checks to run."""
        from ..checks import CHECKS

        return [check for check in CHECKS if check.name in self.names]

    def work(self) -> Iterator[Message]:
        """Do the job. Warnings of the target are not shown: the report takes their place."""
        from ..subject.discovery._discover import discover

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stage = "loading"
            try:
                yield StageBegun(stage)
                target = _loaded(self.target)
                how = _loaded(self.how)
                stage = "calling"
                yield StageBegun(stage)
                subject = discover(target, self.hints, self.promise, how, self.arguments)
                del target  # which may be larger than what is tested of it
                yield CallDescription(call_in_words(subject), subject.reading.assumed, size_of(subject.target))
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # exit, and classes of the target's own
                yield failed(error, stage)
                return
            others: tuple[CallVariant, ...] = ()
            if self.looks:
                yield StageBegun("looking")
                direction = list(_direction(subject))
                yield from direction
                causal = direction[0].causal if direction and self.promise.causal is None else self.promise.causal
                others = variants(subject, causal)
            for check in self.parts:
                yield StageBegun(check.name)
                done = run_check(check, subject, others)
                others = tuple(
                    replace(
                        variant,
                        named=variant.named
                        or any(finding.message.startswith(f"With {variant.words}: ") for finding in done.findings),
                    )
                    for variant in others
                )
                yield done


@dataclass(frozen=True)
class CallDescription:
    """Message: how the target is called, as in `Report`."""

    called: str
    assumed: tuple[str, ...]
    size: int = 0  # bytes of the parameters and buffers that are tested


@dataclass(frozen=True)
class FoundReading:
    """Message: the direction in which the target reads, as measured."""

    causal: bool | None  # None: neither the one nor the other
    mixes: bool  # whether any output depends on another position's input


@dataclass(frozen=True)
class TargetUnusable:
    """Message: the target cannot be made or called, so no further messages follow."""

    error: str
    location: Location | None
    stage: str


@dataclass(frozen=True)
class RequestError:
    """The user's request cannot be fulfilled: an error to raise."""

    error: Exception
    traceback: str = ""  # of the process that it happened in


@dataclass(frozen=True)
class Printed:
    """Message: what the target printed."""

    text: str


DIRECTIONS = (
    "it is bidirectional: every output depends on every input (otherwise --causal)",
    "it is causal: no output depends on a later input (otherwise --bidirectional)",
)
Message = StageBegun | CallDescription | FoundReading | CheckDone | TargetUnusable | RequestError | Printed


def _loaded(named: Any) -> Any:
    if not isinstance(named, str):
        return named
    from ..subject._load import load

    return load(named)


def _direction(subject: Subject) -> Iterator[FoundReading]:
    """Whether the target is causal, as measured; nothing if its calls fail: the checks report these failures."""
    try:
        sizes = own_dependence(subject)
    except (Exception, SystemExit):  # whatever it is, a check meets it again
        return
    mixes = bool(off_diagonal(sizes > 0).any())
    yield FoundReading({"causal": True, "bidirectional": False}.get(direction_of(sizes)) if mixes else None, mixes)


def failed(error: BaseException, stage: str) -> TargetUnusable | RequestError:
    """An error through the target's own lines is its fault; other errors come from the user of `verify` or from us."""
    if isinstance(error, Undecided):
        return RequestError(error)
    if isinstance(error, TargetError):
        return TargetUnusable(error.error, error.location, stage)
    location = location_of(error)
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        location = line_of(error.filename, error.lineno or 0, "")
    if location is None and isinstance(error, Exception):
        known = type(error).__module__ == "builtins"  # an exception of another package may not pickle
        lines = "".join(traceback.format_exception(error))
        return RequestError(error if known else RuntimeError(error_in_words(error)), lines)
    words = f"exit({error.code!r})" if isinstance(error, SystemExit) else error_in_words(error)
    return TargetUnusable(words, location, stage)
