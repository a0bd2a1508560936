"""Which accelerations are on in a thread, and telling them of a call."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..operator._masks import Causal, Documents, Mask


class CallCounts:
    """What went where: calls taken, by backend; calls left, by the reason; how many of both a compiler traced."""

    def __init__(self) -> None:
        self.backends: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.traced = 0


class ActiveAccelerations:
    """The accelerations that are on in one thread, and what is undone with the last one."""

    def __init__(self) -> None:
        self.on: tuple[CallCounts, ...] = ()
        self.blocks = ExitStack()


class NotOfTokens(Exception):
    """A call of attention in a packed row that is not one of its tokens with each other."""


@dataclass(eq=False)
class AttentionOfTokens:
    """What calls of attention mean while the real tokens of a batch stand in one row.

    Attributes:
        documents: which tokens belong together. tokens: how many there are.
        causal: whether a token sees those before it alone.
        calls: how many calls there were.
    """

    documents: Documents
    tokens: int
    causal: bool
    calls: int = 0

    def __post_init__(self) -> None:
        self.mask: Mask = Causal() & self.documents if self.causal else self.documents


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held = ActiveAccelerations()
        self.packed: AttentionOfTokens | None = None
        self.counting = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Calls within it are counted already."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    @contextmanager
    def attending(self, attention: AttentionOfTokens) -> Iterator[None]:
        """Calls of F.scaled_dot_product_attention within it are of this row of tokens."""
        before, self.packed = self.packed, attention
        try:
            yield
        finally:
            self.packed = before


THREAD = _Thread()


def counted(backend: str | None, reason: str, traced: bool) -> None:
    """One call of this thread: a backend took it, or it was left for a reason."""
    for run in THREAD.held.on if THREAD.counting else ():
        if backend is not None:
            run.backends[backend] += 1
        else:
            run.left[reason] += 1
        run.traced += traced
