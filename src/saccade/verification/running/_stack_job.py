"""The verification of a stack as a stream of messages. One that a file makes runs in a child, as a module does."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from io import StringIO
from typing import Any

from ..findings._finding import CheckDone, Inapplicable, Outcome, StageBegun, TargetError, UnreadableResult
from ..stacks._opened import Given, opened
from ..stacks._probe import Probe
from ..stacks._runner import probed, raised
from ..stacks.probes import PROBES
from ..subject._kinds import name_of
from ..subject._load import load
from ..subject._shortened import size_of
from ._job import CallDescription, Message, Printed, failed

_BATCH = "Documents can be given."


@dataclass(frozen=True)
class StackOpened(CallDescription):
    """Message: the stack is made."""

    name: str = ""
    causal: bool | None = None


@dataclass(frozen=True)
class StackJob:
    """A function that makes a stack, "path/to/stack.py:make", and the user's promises."""

    target: str
    promises: Mapping[str, Any]
    names: tuple[str, ...] = tuple(probe.name for probe in PROBES)  # of the probes to run

    @property
    def parts(self) -> list[Probe]:
        """The probes to run."""
        return [probe for probe in PROBES if probe.name in self.names]

    def work(self) -> Iterator[Message]:
        """Make and verify the stack. Warnings of it are not shown."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stage = "loading"
            try:
                yield StageBegun(stage, limited=False)  # it may read a dataset, or gigabytes of weights
                make = load(self.target)
                made = inspect.unwrap(make)() if getattr(make, "is_verified", False) else make()
                given = given_by(made, self.target, **self.promises)
                stage = "calling"
                yield from messages(given, self.parts)
            except (KeyboardInterrupt, GeneratorExit):
                raise
            except BaseException as error:  # exit, and classes of the target's own
                yield failed(error, stage)


def given_by(made: Any, named: str, **arguments: Any) -> Given:
    """The stack that a function returned: a model, a dict of `verify_stack`'s arguments, or a tuple of them in their
    order. `arguments` are further ones.

    Raises:
        ValueError: it is something else; the message says what `named` returned.
    """
    names = [field.name for field in fields(Given) if field.name not in ("words", "subject")]
    given = dict(made) if isinstance(made, Mapping) else {"model": made}
    if isinstance(made, tuple):
        given = dict(zip(names, made, strict=False))
    given |= arguments
    unknown = sorted(map(str, set(given) - set(names)))
    if unknown or (given.get("model") is None and given.get("trainer") is None):
        wrong = f"unknown {', '.join(unknown)}" if unknown else "no model"
        raise ValueError(f"{named}: expected a dict with model and any of {', '.join(names[1:])}; got {wrong}")
    return Given(**{"model": None, **given})


def messages(given: Given, probes: Sequence[Probe]) -> Iterator[Message]:
    """Open the stack, and run the probes on it.

    Raises:
        TypeError, ValueError: arguments of no use.
    """
    yield CallDescription("", (), size_of(given.model))
    with redirect_stdout(StringIO()) as printed:
        yield from _tested(given, probes)
    if printed.getvalue():
        yield Printed(printed.getvalue())


def _tested(given: Given, probes: Sequence[Probe]) -> Iterator[Message]:
    yield StageBegun("calling")
    try:
        stack = opened(given)
        size = sum(map(size_of, stack.modules))
        yield StackOpened("", stack.assumed, size, stack.name, stack.promises.causal)
        yield from probed(probes, stack)
    except (Inapplicable, UnreadableResult) as reason:
        name = given.model if isinstance(given.model, str) else name_of(given.model)
        yield StackOpened("", (), 0, name, given.causal)
        yield CheckDone(Outcome("batch", "batch", _BATCH, "n/a", str(reason), measured=False), ())
    except TargetError as error:
        outcome = Outcome("batch", "batch", _BATCH, "n/a", "a call of it raised an error", measured=False)
        yield CheckDone(outcome, (raised("batch", error),))
