"""The active accelerations of each thread, and counting their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..operator._masks import Causal, Documents, Mask
from ..support._threads import PerThread


class CallCounts:
    """Counts of calls: accelerated ones by backend, others by reason, and those that a compiler traced."""

    def __init__(self) -> None:
        self.backends: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.traced = 0


class NotOfTokens(Exception):
    """Raised for an attention call in a packed row that is not self-attention of its tokens."""


@dataclass(eq=False)
class AttentionOfTokens:
    """The masking of attention calls while the real tokens of a batch are packed into one row.

    Attributes:
        documents: which tokens belong together. tokens: how many there are.
        causal: whether a token sees no later token.
        calls: how many calls there were.
    """

    documents: Documents
    tokens: int
    causal: bool
    calls: int = 0

    def __post_init__(self) -> None:
        self.mask: Mask = Causal() & self.documents if self.causal else self.documents


class ActiveAccelerations:
    """The active accelerations of one thread, and what to restore when the last one ends."""

    def __init__(self) -> None:
        self.on: tuple[CallCounts, ...] = ()
        self.blocks = ExitStack()
        self.packed: AttentionOfTokens | None = None
        self.counting = True
        self.measuring = False  # whether layers repeat no proofs, whose calls are not the model's

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """A block in which attention calls are not counted."""
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before

    @contextmanager
    def unproved(self) -> Iterator[None]:
        """A block in which layers compute each call once: no proofs begin or are repeated."""
        before, self.measuring = self.measuring, True
        try:
            yield
        finally:
            self.measuring = before

    @contextmanager
    def attending(self, attention: AttentionOfTokens) -> Iterator[None]:
        """A block in which calls of F.scaled_dot_product_attention read this packed row."""
        before, self.packed = self.packed, attention
        try:
            yield
        finally:
            self.packed = before


THREAD = PerThread(ActiveAccelerations)


def counted(backend: str | None, reason: str, traced: bool) -> None:
    """Count a call of this thread: accelerated by a backend, or not, for a reason."""
    for run in THREAD.held.on if THREAD.held.counting else ():
        if backend is not None:
            run.backends[backend] += 1
        else:
            run.left[reason] += 1
        run.traced += traced
