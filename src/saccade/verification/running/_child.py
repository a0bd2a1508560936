"""Verification in a child process with limits: a target may crash, hang, print or exit, and the other checks go on.

The child does the job and streams messages through a pipe; the parent watches the clock and the child's life. Where
one dies, the check that killed it becomes a finding, and a new child goes on with the next check.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from ...support._registered import registered
from ..subject._shortened import size_of
from ._deaths import ENTRY, ChildDeath, as_message, left_out
from ._job import CallDescription, CheckDone, Job, Message, Printed, StageBegun, TargetUnusable
from ._stack_job import StackJob

STARTING = 120.0  # seconds: a new Python that imports PyTorch from a slow disk
_DAY = 86400.0  # seconds
MOST_HANGS = 3  # checks that may run out of time, then the rest is left out
MOST_PRINTED = 64 * 2**10  # bytes of the target's output that are kept
GRACE = 2.0  # seconds: a child that is over its limit writes where it is, before it is killed


@dataclass(frozen=True)
class Limits:
    """Resources that a target may use.

    `seconds` is for loading it, for finding out how it is called, and for each check. `gib` is memory above what the
    process has at its start (on Linux; elsewhere only the time is limited). Both grow with a model: by `seconds` for
    each GiB of its parameters, and by four times their size.

    Raises:
        ValueError: a number that is not above 0.

    Example:
        >>> from saccade.verification import Limits
        >>> Limits(seconds=10.0)  # saccade.verify(..., limits=Limits(seconds=10.0))
        Limits(seconds=10.0, gib=4.0)
    """

    seconds: float = 60.0
    gib: float = 4.0

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("gib", self.gib)):
            if not value > 0:
                raise ValueError(f"limits: {name} is {value}; expected a number above 0")

    def of_size(self, size: int) -> Limits:
        """The limits for a model of `size` bytes: copies of it, its gradients, and it in float64."""
        gib = size / 2**30
        return Limits(self.seconds * (1 + gib), self.gib + 4 * gib)


@dataclass(frozen=True)
class ChildStarted:
    """Message: the child runs. `spoilt`: it was forked from a process whose GPU or autograd threads it cannot use."""

    spoilt: bool


@dataclass(frozen=True)
class ChildEnded:
    """The child has finished all its work."""


def isolated(job: Job | StackJob, limits: Limits) -> Iterator[Message]:
    """The messages of `job.work()`, from child processes, and at last what they printed; a stack says that itself.

    Raises:
        ValueError: the target can reach a child neither by fork nor by pickle, or this process may have no children.
    """
    if multiprocessing.current_process().daemon:
        raise ValueError(
            "verify: this is a daemon process of multiprocessing (a worker of a pool or a DataLoader), which cannot "
            "start a process; isolated=False verifies in the current process"
        )
    parts = {part.name: part for part in job.parts}
    left, hangs, method, printed = list(parts), 0, _method(job), bytearray()
    size = _known_size(job.target)
    while left:
        with Child(replace(job, names=tuple(left)), limits, size, method, printed) as child:
            for message in child.messages():
                if isinstance(message, CheckDone):
                    left.remove(message.outcome.name)
                yield message
        if child.spoilt:
            method = _pickled(job)
            continue
        if child.death is None:
            break
        hangs += child.death.kind == "time"
        if child.death.stage == "looking" and isinstance(job, Job):  # a check meets again what ended it
            job = replace(job, looks=False)
            continue
        message_of_death = as_message(child.death, job.parts, child.size)
        yield message_of_death
        if isinstance(message_of_death, TargetUnusable):
            break
        left.remove(child.death.stage)
        if hangs == MOST_HANGS:
            yield from (left_out(parts[name], f"not run: {hangs} checks ran out of time before") for name in left)
            break
    if isinstance(job, Job):
        yield Printed(printed.decode("utf-8", "replace"))


# The parent's side


class Child:
    """One child process at its job; leaving the context ends it and all that it started."""

    def __init__(self, job: Job | StackJob, limits: Limits, size: int, method: str, printed: bytearray) -> None:
        context: Any = multiprocessing.get_context(method)
        self.limits, self.size, self.printed = limits, size, printed
        self.spoilt, self.stage = False, "starting"
        self.death: ChildDeath | None = None
        pipes = [context.Pipe(duplex=False) for _ in range(3)]
        self._readers: list[Connection[Any, Any]] = [pipe[0] for pipe in pipes]
        writers = [pipe[1] for pipe in pipes]
        self._messages, self._output, self._traces = self._readers
        self._process = context.Process(target=serve_in_child, args=(job, limits, size, method, *writers), daemon=False)
        try:
            _start(self._process)
        finally:
            for writer in writers:
                writer.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        _kill(self._process)
        for reader in self._readers:
            reader.close()

    def messages(self) -> Iterator[Message]:
        """Messages of the child, until it is done or dead; then `death` gives the reason."""
        deadline = time.monotonic() + STARTING
        while True:
            ready = wait([*self._readers[:2], self._process.sentinel], max(0.0, deadline - time.monotonic()))
            self._drain()
            if self._messages in ready:
                try:
                    message = self._messages.recv()
                except (EOFError, OSError):
                    self.death = self._end()
                    return
                if isinstance(message, ChildEnded):
                    return
                if isinstance(message, ChildStarted):
                    self.spoilt = message.spoilt
                    if self.spoilt:
                        return
                    continue
                if isinstance(message, StageBegun):
                    self.stage = message.name
                    deadline = time.monotonic() + (self._seconds if message.limited else _DAY)
                if isinstance(message, CallDescription):
                    self.size = message.size
                yield message
            elif self._process.sentinel in ready:
                self.death = self._end()
                return
            elif time.monotonic() >= deadline:
                self._traces.poll(GRACE)
                time.sleep(0.05)  # the rest of what faulthandler writes
                self.death = ChildDeath("time", self.stage, 0, self._seconds, self._trace())
                return

    @property
    def _seconds(self) -> float:
        return self.limits.of_size(self.size).seconds

    def _end(self) -> ChildDeath:
        self._process.join(GRACE)
        self._drain()
        code = self._process.exitcode
        if code is None:  # it closed the pipe and lives on: as good as dead
            return ChildDeath("exit", self.stage, 0, 0.0, self._trace())
        kind: Any = "signal" if code < 0 else "exit"
        return ChildDeath(kind, self.stage, abs(code), 0.0, self._trace())

    def _drain(self) -> None:
        """Keep the beginning of the output and throw the rest away, so that a child with much output does not
        block. At most 64 reads: a child that writes as fast as this reads has a time limit, too."""
        for _ in range(64):
            if not self._output.poll():
                return
            try:
                read = _read(self._output)
            except (EOFError, OSError):
                return
            if not read:
                return
            self.printed += read[: MOST_PRINTED - len(self.printed)]

    def _trace(self) -> str:
        """The traceback written by faulthandler."""
        written = bytearray()
        with contextlib.suppress(EOFError, OSError):
            while self._traces.poll():
                read = _read(self._traces)
                if not read:
                    break
                written += read
        return written.decode("utf-8", "replace")


def _read(connection: Connection[Any, Any]) -> bytes:
    """The bytes available in a pipe; they are raw, not made by `send`."""
    return os.read(connection.fileno(), 65536) if os.name == "posix" else connection.recv_bytes()


def _start(process: Any) -> None:
    # Python 3.12 warns of a fork in a process with threads. Here it is meant: closures and classes of a notebook reach
    # a child in no other way, and the child uses no lock or thread of the parent's (see `serve_in_child`).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()


def _kill(process: Any) -> None:
    """End the child and all that it started, and leave no zombie."""
    if process.pid is not None and os.name == "posix":
        apart = list(_started_by(process.pid))  # before the child ends: then the kernel forgets who started them
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid in apart:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


def _started_by(pid: int) -> Iterator[int]:
    """The processes below a process, also those with a session of their own, if Linux reports them."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _started_by(child)


def _known_size(target: Any) -> int:
    """The bytes of a model, or of its files before it is loaded; 0 if they are unknown."""
    if not isinstance(target, str):
        return size_of(target)
    if not target.startswith("hf:"):
        return 0
    return int(registered("verified_models").size_of_weights(target.removeprefix("hf:")))


def _method(job: Job | StackJob) -> str:
    """The way in which the target reaches a child: "fork", or pickled code. Fork can pass any object. It is not safe
    after this process has used a GPU, or on macOS the system's linear algebra, so there pickle is tried first."""
    if isinstance(job, StackJob):  # which compares numbers of threads, and a fork has one
        return "spawn"
    if "fork" in multiprocessing.get_all_start_methods() and not _uses_gpu(job.target):
        if sys.platform == "linux":
            return "fork"
        try:
            return _pickled(job)
        except ValueError:
            return "fork"
    return _pickled(job)


def _pickled(job: Job | StackJob) -> str:
    try:
        ForkingPickler.dumps(job)
    except Exception as error:
        raise ValueError(
            "target: it cannot be sent to a child process here (a GPU is in use, or this system cannot fork), because "
            f"it does not pickle ({' '.join(str(error).split())}); isolated=False runs it in this process, "
            'and the string "path/to/file.py:Name" lets the child import it'
        ) from error
    return "spawn"


def _uses_gpu(target: Any) -> bool:
    if torch.cuda.is_initialized():
        return True
    parameters = target.parameters() if isinstance(target, torch.nn.Module) else ()
    return any(parameter.device.type not in ("cpu", "meta") for parameter in parameters)


# The child's side


def serve_in_child(
    job: Job | StackJob,
    limits: Limits,
    size: int,
    method: str,
    messages: Connection[Any, Any],
    output: Connection[Any, Any],
    traces: Connection[Any, Any],
) -> None:
    """Run the job in its own process, and send the result."""
    if method == "fork":
        torch.set_num_threads(1)  # first of all: GNU OpenMP waits for ever for the threads that a fork leaves behind
    if os.name == "posix":
        os.setsid()  # Ctrl-C is the parent's; and so what the target starts can be ended with it
        _die_with_parent()
    _redirect(output)
    trace = _descriptor(traces)
    faulthandler.enable(trace)
    messages.send(ChildStarted(method == "fork" and _spoilt()))
    if isinstance(job, Job):  # what a stack takes is known when it is made
        _limit_memory(limits.of_size(size).gib)
    own = os.getpid()
    for message in job.work():
        if os.getpid() != own:  # the target forked, and its child came back from the call: it has no say here
            os._exit(0)
        if isinstance(message, CallDescription):
            size = message.size
            _limit_memory(limits.of_size(size).gib)
        if isinstance(message, StageBegun) and message.limited:
            faulthandler.dump_traceback_later(limits.of_size(size).seconds, file=trace)
        else:
            faulthandler.cancel_dump_traceback_later()
        _flush()
        messages.send(message)
    messages.send(ChildEnded())


assert serve_in_child.__name__ == ENTRY


def _redirect(output: Connection[Any, Any]) -> None:
    """Standard input empty, standard output and error into the pipe, those of C too."""
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    written = _descriptor(output)
    for number in (1, 2):
        os.dup2(written, number)
    # Kept alive: closing what the parent had in their place would write its buffers a second time.
    _kept.extend([sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115


_kept: list[Any] = []  # of the child alone


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the target may have put anything in their place, or closed them
            stream.flush()


def _descriptor(connection: Connection[Any, Any]) -> int:
    if os.name == "posix":
        return connection.fileno()
    import msvcrt

    return msvcrt.open_osfhandle(connection.fileno(), os.O_WRONLY)  # type: ignore[attr-defined]


def _die_with_parent() -> None:
    """Let Linux end the child when its parent is killed, and keep its descendants below it, so that `_started_by`
    finds them."""
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
            libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the parent was killed before the kernel was told


def _limit_memory(gib: float) -> None:
    if sys.platform != "linux":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file behind
    # A GPU's driver reserves far more addresses than memory: there only what can be written to is counted.
    kind = resource.RLIMIT_DATA if torch.cuda.is_available() else resource.RLIMIT_AS
    field = "VmData:" if kind == resource.RLIMIT_DATA else "VmSize:"
    with open("/proc/self/status", encoding="ascii") as status:
        used = next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    wanted, (before, most) = used + int(gib * 2**30), resource.getrlimit(kind)
    wanted = wanted if before == most else max(wanted, before)  # the second time it may only grow
    resource.setrlimit(kind, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _spoilt() -> bool:
    """Whether this fork cannot run because its parent has used a GPU, or started autograd's threads for one."""
    if not torch.cuda.is_available() and not getattr(torch.cuda, "_is_in_bad_fork", bool)():
        return False
    if getattr(torch.cuda, "_is_in_bad_fork", bool)():
        return True
    try:
        torch.ones((), requires_grad=True).mul(2).backward()
    except RuntimeError:
        return True
    return False
