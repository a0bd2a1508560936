"""A function of the user's, called by several processes that are the ranks of a group of torch.distributed."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..findings._finding import Inapplicable, Location, TargetError
from ..subject._calling import guarded
from ._documents import Documents
from ._stack import per_token

_SECONDS = 30  # until a rank that others wait for is an error
_PATIENCE = 2 * _SECONDS  # for one call
_GRACE = 1.0  # of the other ranks after an error: theirs may have come before


class RankOutput(NamedTuple):
    """The output (L, V) of documents in one row, and the loss if there is one."""

    out: Tensor
    loss: float | None


class _RankError(NamedTuple):
    """An error of one rank. Of ranks that wait for one another the first error is the cause."""

    time: float
    rank: int
    words: str
    location: Location | None


@contextmanager
def ranks(count: int, function: Callable[[Documents], Any]) -> Iterator[Callable[[Documents], RankOutput]]:
    """Within, a call runs `function` on each rank, and gives what rank 0 returns.

    The ranks are forks of this process, so they have its model as it is now. A call raises TargetError if a rank raises
    an error, ends, or does not answer.

    Raises:
        Inapplicable: this process cannot fork, or is a rank itself.
    """
    _check_forks()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes: list[Any] = []
        try:
            for rank in range(count):
                ours, theirs = context.Pipe()
                arguments = (theirs, [*ends, ours], function, rank, count, os.path.join(folder, "store"))
                processes.append(context.Process(target=_serve, args=arguments, daemon=True))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which none uses
                    processes[-1].start()
                theirs.close()
                ends.append(ours)
            yield lambda documents: _called(ends, documents)
        finally:
            for end in ends:
                end.close()
            for process in processes:
                process.kill()
                process.join()


def _check_forks() -> None:
    if not dist.is_available() or "fork" not in multiprocessing.get_all_start_methods():
        raise Inapplicable("ranks are forked processes with torch.distributed, which this system does not have")
    if dist.is_initialized():
        raise Inapplicable("this process is a rank of a group already: verify in a process of its own")
    if torch.cuda.is_initialized():
        raise Inapplicable("this process uses a GPU, so it cannot fork: verify a copy on the CPU")


def _called(ends: list[Connection], documents: Documents) -> RankOutput:
    for end in ends:
        with suppress(OSError):  # of a process that has ended
            end.send(documents)
    answers: dict[int, Any] = {}
    end_of_time = time.monotonic() + _PATIENCE
    while len(answers) < len(ends):
        ready = wait([end for rank, end in enumerate(ends) if rank not in answers], end_of_time - time.monotonic())
        if not ready:
            break
        for rank in (ends.index(end) for end in ready):  # type: ignore[arg-type]
            answers[rank] = _answer(ends[rank], rank)
            if isinstance(answers[rank], _RankError):  # the others may wait for it
                end_of_time = min(end_of_time, time.monotonic() + _GRACE)
    errors = sorted((answer for answer in answers.values() if isinstance(answer, _RankError)), key=lambda it: it.time)
    if errors:
        raise TargetError(f"{errors[0].words}, on rank {errors[0].rank} of {len(ends)}", errors[0].location)
    if len(answers) < len(ends):
        late = min(set(range(len(ends))) - set(answers))
        raise TargetError(f"TimeoutError: rank {late} of {len(ends)} gave no answer within {_PATIENCE} seconds", None)
    out, dtype, loss = answers[0]
    return RankOutput(torch.from_numpy(out).to(dtype), loss)


def _answer(end: Connection, rank: int) -> Any:
    with suppress(EOFError, ConnectionError):
        return end.recv()
    return _RankError(time.time(), rank, "RuntimeError: the process ended", None)


# The ranks' side


def _serve(
    end: Connection,
    of_parent: list[Connection],
    function: Callable[[Documents], Any],
    rank: int,
    count: int,
    store: str,
) -> None:
    for inherited in of_parent:  # else this end would stay open when the parent ends
        inherited.close()
    torch.set_num_threads(1)  # first of all: GNU OpenMP waits for ever for the threads that a fork leaves behind
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    timeout = timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timeout)
    while True:
        try:
            documents = end.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: Any = _output(function, documents)
        except TargetError as error:
            answer = _RankError(time.time(), rank, error.error, error.location)
        end.send(answer)


def _output(function: Callable[[Documents], Any], documents: Documents) -> tuple[Any, torch.dtype, float | None]:
    with torch.no_grad():
        returned = guarded(function, documents)
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    out = per_token(returned, torch.empty(1, sum(map(len, documents))))[0]
    return out.detach().cpu().double().numpy(), out.dtype, None if loss is None else float(loss)
