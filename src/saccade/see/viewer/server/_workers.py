"""The threads that answer: what takes long never holds up what is quick."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# By what an operation costs: a word or a pair; a part of one head, after at most one walk over its pairs; a walk over
# all pairs of a head, or of every head. Two walks fill the cores, and more would only keep each other waiting.
THREADS = {"quick": 2, "part": 3, "walk": 2}
KINDS = {
    "column": "part",
    "heads": "walk",
    "importance": "walk",
    "overview": "walk",
    "patching": "walk",
    "rows": "walk",
    "step": "walk",
}
FINE = 5  # levels below are computed from the pairs of the tile alone


class Workers:
    """Threads for requests of every kind. What has begun ends when the maps are closed, at their next part."""

    def __init__(self) -> None:
        self._pools = {
            kind: ThreadPoolExecutor(threads, thread_name_prefix=f"saccade-viewer-{kind}")
            for kind, threads in THREADS.items()
        }
        self._given: list[Future[Any]] = []
        self.closed = False

    def submit(self, op: object, params: object, answer: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """What ``answer`` gives, from a thread of the kind that the request needs."""
        future = self._pools[_kind(op, params)].submit(answer, *arguments)
        self._given = [*(one for one in self._given if not one.done()), future]
        return future

    @property
    def busy(self) -> bool:
        """Whether something is being computed."""
        return any(future.running() for future in self._given)

    def close(self) -> None:
        """End the threads; what none of them has begun is dropped."""
        self.closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _kind(op: object, params: object) -> str:
    """Requests come from outside: any `op` and `params` have a kind, and are found wrong when they are answered."""
    if op != "tile" or not isinstance(params, dict):
        return KINDS.get(op, "quick") if isinstance(op, str) else "quick"
    level = params.get("level")
    fine = isinstance(level, int) and level < FINE
    return "part" if fine or params.get("exact") is False else "walk"
