"""Ranks that fail: which one, and why, known to all ranks through the store of torch.distributed.

A rank whose messages fail writes what it waited for into the store; a rank that ends with an error of its own writes
that. The first rank that can tell the cause writes it for all. The store is that of the default group, so that
failures in one group explain those in others; ranks are those of all processes.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WAITING = 0.75  # share of the group's timeout after which a wait has failed; the rest is for finding the cause
_GRACE = 1.0  # seconds in which a rank that has closed its connections may still write why
_FAREWELL = 10.0  # most seconds that the process with the store waits for others to read the cause
_POLL = 0.02
_KEY = "saccade/fault"
_PROBE = 2  # a tag of messages that nobody sends
_NETWORK = "gloo/transport", "third_party/gloo", "pair closure"  # in errors of gloo, which are plain RuntimeErrors

Record = dict[str, Any]  # a cause {rank, reason}, or a wait {operation, peers, late}


class RankFailed(RuntimeError):
    """A rank has ended, hangs or raised an error of its own, and others wait for it.

    Every rank that waits, directly or for one that waits, raises this with the same cause. The process group cannot be
    used any more.

    Attributes:
        rank: the rank that failed, of all processes; the first of several.
        reason: what happened to it; part of the message.

    Example:
        >>> import saccade
        >>> error = saccade.distributed.RankFailed("attention: rank 1 raised MemoryError", 1, "raised MemoryError")
        >>> error.rank
        1
    """

    def __init__(self, message: str, rank: int = -1, reason: str = "") -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason


@contextmanager
def answered(group: Any, operation: str, peers: Sequence[int] = ()) -> Iterator[None]:
    """A block that waits for other ranks. RankFailed, naming operation, rank and reason, if they do not answer.

    Args:
        peers: the ranks waited for, of all processes; none: any of the group.
    """
    try:
        yield
    except RankFailed:
        raise
    except RuntimeError as error:
        if not (peers or isinstance(error, dist.DistError) or any(word in str(error) for word in _NETWORK)):
            raise
        late = "imed out" in str(error)
        suspects = list(peers) if late or len(peers) == 1 else _disconnected(group) or list(peers)
        cause = _cause({"operation": operation, "peers": suspects, "late": late}, group)
        raise RankFailed(f"{operation}: {cause['reason']}", cause["rank"], cause["reason"]) from error


def report(error: BaseException) -> None:
    """Tell the other ranks why this one ends, unless they know."""
    if isinstance(error, RankFailed) or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    words = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    record = {"rank": dist.get_rank(), "reason": f"rank {dist.get_rank()} raised {words}"}

    ranks = range(dist.get_world_size())
    found = _within(_GRACE, lambda: _Board(ranks).publish(record))
    if found is not None:
        _await_readers(ranks, found)


def report_uncaught() -> None:
    """Report uncaught exceptions of this process to the other ranks, and explain those that a failed rank causes."""
    before = sys.excepthook
    if getattr(before, "reports", False):
        return

    @functools.wraps(before)
    def hook(kind: Any, error: BaseException, trace: Any) -> None:
        with suppress(Exception):
            try:
                with answered(None, "an operation of torch.distributed"):
                    raise error
            except RankFailed as named:
                error, trace = named, trace if named is error else named.__traceback__
            except BaseException as other:
                report(other)
        before(type(error), error, trace)

    hook.reports = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def timeout(group: Any) -> float:
    """Seconds of a group's timeout."""
    group = group or dist.group.WORLD
    return float(group._get_backend(group._device_types[0]).options._timeout.total_seconds())


def _disconnected(group: Any) -> list[int]:
    """The ranks to which gloo has no connection any more: it does not say which of those in a collective."""
    lost = []
    for rank in _others_by_gloo(group):
        try:
            dist.irecv(torch.empty(1), rank, group, _PROBE)  # posted, never waited for
        except RuntimeError:
            lost.append(rank)
    return lost


def _hang_up(group: Any) -> None:
    """Close this rank's connections, as gloo does after a timeout: ranks that wait for it read the cause at once."""
    for rank in _others_by_gloo(group):
        try:
            work = dist.irecv(torch.empty(1), rank, group, _PROBE)
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "imed out" in str(error):
                return


def _others_by_gloo(group: Any) -> list[int]:
    """The other ranks of a group on gloo; none if it has another backend."""
    group = group or dist.group.WORLD
    if not isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo):
        return []
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def _cause(wait: Record, group: Any) -> Record:
    """Rank and reason, the same on all ranks that can reach the store; `wait`: what this rank waits for."""
    ranks, rest = dist.get_process_group_ranks(group or dist.group.WORLD), (1 - WAITING) * timeout(group)
    board = _Board(ranks)
    found: Record | None = _within(rest + _GRACE, lambda: _agreed_cause(board, wait, 0.8 * rest, timeout(group)))
    if found is None:  # what holds the store has ended, or is stopped
        holder = "rank 0, which holds" if _held_by_a_rank() else "the process that holds"
        return {"rank": 0, "reason": f"{holder} the store of the process group, has ended or does not answer"}
    _hang_up(group)
    _await_readers(ranks, found, rest)
    return found


def _agreed_cause(board: _Board, wait: Record, rest: float, seconds: float) -> Record:
    began = time.monotonic()
    board.set(str(dist.get_rank()), wait)
    while True:
        waits = board.waits()
        passed = time.monotonic() - began
        cause = board.get("cause") or _judged(wait["peers"], waits, board.ranks, passed, rest, seconds)
        if cause is not None:
            return board.publish(cause)
        time.sleep(_POLL)


def _judged(
    peers: Sequence[int], waits: Mapping[int, Record], ranks: Sequence[int], passed: float, rest: float, seconds: float
) -> Record | None:
    """The cause as far as this rank can tell, or None: later. A rank that fails writes nothing; those that wait do."""
    silent = [rank for rank in ranks if rank not in waits]
    suspects = [rank for rank in peers if rank in silent] or silent
    late, over = any(record["late"] for record in waits.values()), passed > rest
    if not silent and passed > min(_GRACE, rest):
        held = "; ".join(f"rank {rank} in {record['operation']}" for rank, record in sorted(waits.items()))
        return {"rank": ranks[0], "reason": f"ranks wait for one another (other calls, or a broken link): {held}"}
    if not silent or not (over or (not late and len(suspects) == 1 and passed > min(_GRACE, rest))):
        return None
    names = f"rank{'s' * (len(suspects) > 1)} {', '.join(map(str, suspects))}"
    if late:
        reason = f"{names} did not answer within {seconds:.0f} s, the timeout: hangs, is stopped or makes no such call"
    else:
        reason = f"{names} ended without reporting an error: killed, out of memory, or out of the group"
    return {"rank": suspects[0], "reason": reason}


class _Board:
    """Notes of the ranks in the store: `cause`, what each rank waits for, and who has read the cause."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks, self._store = ranks, dist.distributed_c10d._get_default_store()

    def set(self, name: str, value: Any) -> None:
        self._store.set(f"{_KEY}/{name}", json.dumps(value))

    def get(self, name: str) -> Any:
        key = f"{_KEY}/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def waits(self) -> dict[int, Record]:
        return {rank: record for rank in self.ranks if (record := self.get(str(rank))) is not None}

    def publish(self, cause: Record) -> Record:
        """The cause that was written first: this one, or another rank's."""
        found: Record = json.loads(self._store.compare_set(f"{_KEY}/cause", "", json.dumps(cause)))
        self.set(f"read/{dist.get_rank()}", True)
        return found


def _await_readers(ranks: Sequence[int], cause: Record, seconds: float = _FAREWELL) -> None:
    """Wait until others have read the cause, if the store ends with this process."""
    if not _held_by_a_rank() or dist.get_rank() != 0:
        return
    board, limit = _Board(ranks), time.monotonic() + min(seconds, _FAREWELL)
    others = [rank for rank in ranks if rank not in (0, cause["rank"])]
    while time.monotonic() < limit and not all(board.get(f"read/{rank}") for rank in others):
        time.sleep(_POLL)


def _held_by_a_rank() -> bool:
    """Whether the store is in a rank's process (rank 0's), not in its launcher's or in a file."""
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return type(store).__name__ == "TCPStore" and os.getenv("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Result of `call`, or None if it fails or takes longer: a store whose process is stopped blocks for ever."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(call())
        except Exception:
            answers.put(None)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return None
