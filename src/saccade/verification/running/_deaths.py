"""Findings about a child process that ended early, with the line of the target's source."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..findings._finding import Finding, Location
from ..findings._locate import is_own, line_of
from ..findings._results import done
from ..stacks._probe import Probe
from ..subject._check import Check
from ._job import CheckDone, TargetUnusable
from ._run import NOT_SMALL

ENTRY = "serve_in_child"  # the function below which a traceback is the child's own
_SIGNALS = {
    "SIGSEGV": "crashed: it read or wrote memory that is not its own (segmentation fault)",
    "SIGABRT": "aborted the process (abort)",
    "SIGFPE": "crashed in arithmetic of whole numbers (SIGFPE)",
    "SIGILL": "crashed on an instruction that this processor lacks (SIGILL)",
    "SIGBUS": "crashed: it read memory that is not there (SIGBUS)",
    "SIGKILL": "was killed from outside, which is what systems do when memory runs out",
    "SIGXCPU": "used up the time that the system allows it",
}


@dataclass(frozen=True)
class ChildDeath:
    """kind "time": killed after `seconds`; "signal": `number` ended it; "exit": it left with status `number`."""

    kind: Literal["time", "signal", "exit"]
    stage: str  # what it was doing: "starting", "loading", "calling", or a check
    number: int = 0
    seconds: float = 0.0
    traceback: str = ""  # as faulthandler writes it

    @property
    def words(self) -> str:
        if self.kind == "time":
            return f"did not finish within {self.seconds:.3g} second{'' if self.seconds == 1 else 's'}"
        if self.kind == "exit":
            return f"ended the process with status {self.number} (os._exit, or a library that did)"
        name = signal.Signals(self.number).name if self.number in set(signal.Signals) else f"signal {self.number}"
        return _SIGNALS.get(name, f"was ended by {name}")


def as_message(death: ChildDeath, parts: Sequence[Check | Probe], size: int = 0) -> CheckDone | TargetUnusable:
    """The message for a child that died at one of these parts, or before. `size`: bytes of the model; a large model
    that ends by a limit of ours is not to blame."""
    location = where(death.traceback)
    check = next((part for part in parts if part.name == death.stage), None)
    if check is None:
        return TargetUnusable(f"It {death.words}", location, death.stage)
    if size >= NOT_SMALL and (death.kind == "time" or death.number == signal.SIGKILL):
        option = "--time-limit" if death.kind == "time" else "this machine's memory"
        return left_out(check, f"not measured: it {death.words}, on a model of {size >> 20} MiB ({option})")
    finding = Finding(
        check.name,
        "robustness",
        "error",
        f"It {death.words}, while '{check.name}' was tested",
        _effect(death),
        _fix(death),
        {"ended": death.kind, "number": death.number, "during": check.name},
        location,
    )
    return done(check, [finding], f"it {death.words}", death.seconds)


def left_out(check: Check | Probe, reason: str) -> CheckDone:
    return done(check, (), reason, measured=False)


def where(traceback: str) -> Location | None:
    """The deepest line of the target's own source in the output of faulthandler, which has a block for each thread with
    the deepest frame first."""
    for block in re.split(r"^(?:Current t|T)hread .*$", traceback, flags=re.MULTILINE):
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, flags=re.MULTILINE)
        names = [name for _, _, name in frames]
        if ENTRY in names:
            own = [frame for frame in frames[: names.index(ENTRY)] if is_own(frame[0])]
            return line_of(own[0][0], int(own[0][1]), own[0][2]) if own else None
    return None


def _effect(death: ChildDeath) -> str:
    if death.kind == "time":
        return "An endless loop, or work that grows far too fast with the length: training would stand still here."
    return "The whole program ends without a Python error: a training run is lost."


def _fix(death: ChildDeath) -> str:
    if death.kind == "time":
        return "Bound the loop by the length of the input; raise --time-limit if it is only slow."
    if death.kind == "exit":
        return "raise RuntimeError(...)  # instead of ending the process"
    return "Run the call under `python -X faulthandler`, and check indices and shapes before native code."
