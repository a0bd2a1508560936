"""What a call costs under a layout: the sizes and speeds that it depends on, the figures, and which layout is cheapest.
`_prediction.py` computes them.

A grid (U, S) is U ranks for the heads by S ranks for the rows: (1, R) is "ring" or "gathered", (R, 1) is "ulysses".
Between them, each part of the sequence has U ranks, which share its heads, and the parts form a ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..operator._masks._data import bounded
from ..support._numbers import duration, rate
from ._blocks import Array

BACKWARD = 2.5  # operations of a backward pass, for each of the forward pass
CLOSE = 0.05  # share of the time that is worth less than memory
Grid = tuple[int, int]


@dataclass(frozen=True)
class CallSizes:
    """Sizes of the tensors of a call: query (batch, heads, L, width), key and value with `kv_heads`.

    Attributes:
        batch: items.
        heads, kv_heads: of query, and of key and value; None: as many as `heads`.
        width, value_width: of query and key, and of value; None: as `width`.
        dtype: of all of them.

    Raises:
        ValueError: a size below 1, or `kv_heads` that do not divide `heads`.

    Example:
        >>> import torch, saccade
        >>> saccade.distributed.CallSizes(heads=32, kv_heads=8, width=128, dtype=torch.bfloat16).key_heads
        8
    """

    heads: int = 8
    kv_heads: int | None = None
    width: int = 64
    value_width: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "width", "value_width", "batch"):
            if (value := getattr(self, name)) is not None:
                bounded(value, name, least=1)
        if self.heads % self.key_heads:
            raise ValueError(f"kv_heads: must divide heads, got {self.kv_heads} and {self.heads}")

    @property
    def key_heads(self) -> int:
        """Number of heads of key and value."""
        return self.kv_heads or self.heads

    @property
    def widths(self) -> tuple[int, int]:
        """Width of query and key, and of value."""
        return self.width, self.value_width or self.width


@dataclass(frozen=True)
class RankSpeed:
    """How fast ranks compute and messages travel, all ranks at work.

    Attributes:
        rate, backward_rate: FLOP/s of a rank's forward and backward pass.
        bandwidth: bytes/s that a rank receives while it sends as many, with the copies before and after.
        latency: seconds of a message without bytes, between ranks that compute.
        memory: bytes/s that sums in memory read and write.
    overlap: share of a message's time in which computing goes on undisturbed; below 0 where it suffers for longer.
    """

    rate: float
    backward_rate: float
    bandwidth: float
    latency: float
    memory: float = math.inf
    overlap: float = 1.0

    def __str__(self) -> str:
        speeds = f"{rate(self.rate, 'FLOP/s')}, {rate(self.bandwidth, 'B/s')}, {duration(self.latency)} a message"
        return f"{speeds}, {rate(self.memory, 'B/s')} in memory"


class Passes(NamedTuple):
    """Something of a forward and of a backward pass, for each rank (R,)."""

    forward: Array
    backward: Array

    @property
    def both(self) -> Array:
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class LayoutCost:
    """Attributes:
    shards, kept, in_flight: bytes for each rank: of query, key, value, out and lse; what the backward pass needs
        beside them; what is sent or received, at most at a time.
    received: bytes.
    compute, links: seconds in which a rank computes and sums up, and in which its link is busy.
    ends: seconds from the beginning of a pass, the same on all ranks, to its end on this one.
    imbalance: of the seconds of computing, the rank with most above the mean.
    """

    layout: str
    grid: Grid
    shards: Array
    kept: Array
    in_flight: Array
    received: Passes
    compute: Passes
    links: Passes
    ends: Passes
    imbalance: float

    @property
    def memory(self) -> Array:
        return self.shards + self.kept + self.in_flight

    @property
    def forward(self) -> float:
        """Seconds of a forward pass: the slowest rank's."""
        return float(self.ends.forward.max())

    @property
    def seconds(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.forward + float(self.ends.backward.max())

    @property
    def name(self) -> str:
        return self.layout if 1 in self.grid else f"{self.layout} {self.grid[0]} x {self.grid[1]}"


def layouts_of(ranks: int, sizes: CallSizes | None) -> list[tuple[str, Grid]]:
    """The layouts for a number of ranks, with their grids. Those that deal heads need to know how many there are."""
    layouts = [("ring", (1, ranks)), ("gathered", (1, ranks))]
    if sizes is not None:
        layouts += [("grid", (u, ranks // u)) for u in range(2, ranks) if ranks % u == 0 and u <= sizes.heads]
        layouts.append(("ulysses", (ranks, 1)))
    return layouts


def cheapest(costs: Iterable[LayoutCost]) -> LayoutCost:
    """The fastest with its backward pass; of those within 5 % of it the one with least memory."""
    costs = list(costs)
    fastest = min(cost.seconds for cost in costs)
    return min(
        (cost for cost in costs if cost.seconds <= fastest * (1 + CLOSE)), key=lambda cost: float(cost.memory.max())
    )


def because(costs: Sequence[LayoutCost]) -> str:
    """The reason for the cheapest: its seconds, and those of the best of every other layout."""
    best = cheapest(costs)
    others: dict[str, str] = {}
    for cost in sorted(costs, key=lambda cost: cost.seconds):
        if cost.name != best.name:
            others.setdefault(cost.layout, f"{cost.name} {duration(cost.seconds)}")
    reason = f"predicted {duration(best.seconds)} forward and backward"
    if best.seconds > min(cost.seconds for cost in costs):
        reason += f", within {CLOSE:.0%} of the fastest and with least memory"
    return f"{reason}; {', '.join(others.values())}"
