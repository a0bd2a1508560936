"""Groups of processes that stay for all tests of a session, one for each number of ranks, and are given work.

A server with PyTorch in memory forks them, so that a group starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

SECONDS = 60


class Ranks:
    """`size` processes, which are the ranks of one gloo group.

    Args:
        folder: where the processes find each other.
        seconds: timeout of their messages.
        store: where they find each other, a file in the folder if None.
        mortal: an error ends a rank, as it ends a program; the answer is the last line that it leaves on stderr.
    """

    def __init__(
        self, size: int, folder: Path, seconds: float = SECONDS, store: str | None = None, mortal: bool = False
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["saccade.distributed", "saccade.operator._attention"])
        self._ends, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            where = store or f"file://{folder / str(size)}"
            process = context.Process(target=_serve, args=(theirs, rank, size, where, seconds, mortal), daemon=True)
            process.start()
            self._ends.append(ours)
            self.processes.append(process)

    def run(self, function, *args):
        """`function(rank, *args)` on every rank: what each returns, or the error that it raises."""
        self.start(function, *args)
        return self.answers()

    def start(self, function, *args):
        work = pickle.dumps((function, args))
        for end, process in zip(self._ends, self.processes, strict=True):
            if process.is_alive():
                end.send_bytes(work)

    def answers(self):
        return [self._answer(end) for end in self._ends]

    @staticmethod
    def _answer(end: Connection):
        try:
            return pickle.loads(end.recv_bytes())
        except EOFError:
            return None

    def close(self) -> None:
        for end, process in zip(self._ends, self.processes, strict=True):
            end.close()
            process.join(5)


def _serve(end: Connection, rank: int, size: int, store: str, seconds: float, mortal: bool) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, str(Path(__file__).parents[2]))  # pytest names test modules from there
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills memory that nobody writes with NaN
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    while True:
        try:
            function, args = pickle.loads(end.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = function(rank, *args)
        except Exception as error:
            if mortal:
                with contextlib.redirect_stderr(io.StringIO()) as shown:
                    sys.excepthook(type(error), error, error.__traceback__)
                end.send_bytes(pickle.dumps(shown.getvalue().splitlines()[-1]))
                os._exit(1)
            answer = error if _pickles(error) else RuntimeError(traceback.format_exc())
        end.send_bytes(pickle.dumps(answer))


def _pickles(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
