"""The threads that answer requests: slow ones never delay quick ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# By cost: a word or a pair; a part of one head, after at most one pass over its pairs; a pass over all pairs of a head,
# or of every head. Two passes use all cores, and more would only delay each other.
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
FINE = 5  # lower levels are computed from the pairs of the tile alone


class Workers:
    """Threads for requests of each kind. Running requests end when the maps are closed, at their next part."""

    def __init__(self) -> None:
        self._pools = {
            kind: ThreadPoolExecutor(threads, thread_name_prefix=f"saccade-viewer-{kind}")
            for kind, threads in THREADS.items()
        }
        self._given: list[Future[Any]] = []
        self.closed = False

    def submit(self, op: object, params: object, answer: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """The future of ``answer``, run by a thread of the request's kind."""
        future = self._pools[_kind(op, params)].submit(answer, *arguments)
        self._given = [*(task for task in self._given if not task.done()), future]
        return future

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return any(future.running() for future in self._given)

    def close(self) -> None:
        """End the threads; requests that have not begun are dropped."""
        self.closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


def _kind(op: object, params: object) -> str:
    """The kind of a request; any `op` and `params` have one, as they are checked only when answered."""
    if op != "tile" or not isinstance(params, dict):
        return KINDS.get(op, "quick") if isinstance(op, str) else "quick"
    level = params.get("level")
    fine = isinstance(level, int) and level < FINE
    return "part" if fine or params.get("exact") is False else "walk"
