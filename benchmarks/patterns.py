"""Whether a sparse pattern costs the tiles that it visits: native forward and forward + backward against their number.

    python benchmarks/patterns.py [--quick] [--rounds 7] [--threads 1] [--out benchmarks/results/patterns.md]

The native kernels walk over tiles of 48 queries by 48 keys and leave empty ones out. For each pattern and length the
tiles of the kernels' own work list are counted, full ones (no bit is looked at) and partial ones, and calls are timed
with the list already made, as from a model's second layer on; making it is timed by itself, mask and all. Patterns take
turns within each round, in an order that moves on by one; times are medians over the rounds, in CPU seconds of the one
thread (with more threads: wall seconds).

    seconds = c * tiles

is fitted over all patterns and lengths, c being the geometric mean of seconds / tiles; the table says by how much each
is off. `c` of a pattern alone, over its lengths, says whether its own time is proportional to its tiles.

Shape legend: query, key, value (1, 4, L, 64), float32; every tile is counted once for each head.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from saccade import Mask, PerHead, Window, _native, attention
from saccade.benchmark.attention.timing import quiet
from saccade.operator._backends.native._lowering import native_mask
from saccade.variants.patterns import (
    bigbird,
    longformer,
    sliding_window,
    sparse_fixed,
    sparse_fixed_heads,
    sparse_strided,
    sparse_strided_heads,
    streaming,
)

GRAIN, HEADS, WIDTH = 48, 4, 64
PROMISED = 0.20
LENGTHS, QUICK = (4096, 8192, 16384, 32768), (4096, 8192, 16384)
MOST = 120_000  # tiles of a case; denser patterns leave their longest lengths out
OUT = Path(__file__).parent / "results" / "patterns.md"
STAGES = ("forward", "forward + backward")

PATTERNS: dict[str, Callable[[], Mask]] = {
    "every key": lambda: Window(None, None),
    "sliding_window(256)": lambda: sliding_window(256),
    "sliding_window(1024)": lambda: sliding_window(1024),
    "longformer(512, global_tokens=[0])": lambda: longformer(512, global_tokens=[0]),
    "longformer(512, dilation=2)": lambda: longformer(512, dilation=2),
    "longformer(256, dilation=(1, 1, 2, 4))": lambda: longformer(256, dilation=(1, 1, 2, 4)),
    "sparse_strided(128)": lambda: sparse_strided(128),
    "sparse_strided_heads(128), two each": lambda: PerHead([*sparse_strided_heads(128)] * 2),
    "sparse_fixed(128, 8)": lambda: sparse_fixed(128, 8),
    "sparse_fixed_heads(128, 8), two each": lambda: PerHead([*sparse_fixed_heads(128, 8)] * 2),
    "bigbird(64)": lambda: bigbird(64),
    "bigbird(48)": lambda: bigbird(48),
    "streaming(1024)": lambda: streaming(1024),
}


@dataclass
class Case:
    """One pattern at one length, and what was measured of it."""

    pattern: str
    length: int
    full: int
    partial: int
    listing: float  # seconds to make mask and list
    mask: Mask
    readings: dict[str, list[float]] = field(default_factory=lambda: {stage: [] for stage in STAGES})

    @classmethod
    def of(cls, pattern: str, length: int) -> Case:
        start = time.perf_counter()
        mask = PATTERNS[pattern]()
        made = native_mask(mask, length, length)
        made.prepare(GRAIN, GRAIN)
        return cls(pattern, length, *visited(made, length), time.perf_counter() - start, mask)

    @property
    def tiles(self) -> int:
        return self.full + self.partial

    def seconds(self, stage: str) -> float:
        return statistics.median(self.readings[stage])


def visited(made: object, length: int) -> tuple[int, int]:
    """(full, partial) tiles of all heads, as the kernels' work list has them."""
    full = partial = 0
    for head in range(made.heads):  # type: ignore[attr-defined]
        for first in range(0, length, GRAIN):
            rows = first, min(first + GRAIN, length)
            for start, stop, whole in _native.pieces(made, (length, length), (GRAIN, GRAIN), (0, head), rows, False):
                if whole:
                    full += stop - start
                else:
                    partial += stop - start
    return full * HEADS // made.heads, partial * HEADS // made.heads  # type: ignore[attr-defined]


def cases(lengths: tuple[int, ...]) -> list[Case]:
    made = [Case.of(pattern, length) for length in lengths for pattern in PATTERNS]
    return [case for case in made if case.tiles <= MOST]


def read(case: Case, stage: str, inputs: list[Tensor], clock: Callable[[], float]) -> float:
    if stage == "forward":
        with torch.no_grad():
            start = clock()
            attention(*inputs, case.mask, backend="native")
            return clock() - start
    start = clock()
    out = attention(*inputs, case.mask, backend="native")
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return clock() - start


def measure(all_cases: list[Case], rounds: int, clock: Callable[[], float]) -> None:
    """Fill the readings in, after one round that nothing is kept of."""
    inputs = {
        length: [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
        for length in {case.length for case in all_cases}
    }
    with quiet():
        for turn in range(rounds + 1):
            for place in range(len(all_cases)):
                case = all_cases[(place + turn) % len(all_cases)]
                for stage in STAGES:
                    seconds = read(case, stage, inputs[case.length], clock)
                    if turn:
                        case.readings[stage].append(seconds)


def slope(some: list[Case], stage: str) -> float:
    """c, the geometric mean of seconds / tiles."""
    return math.exp(statistics.mean(math.log(case.seconds(stage) / case.tiles) for case in some))


def off(case: Case, stage: str, c: float) -> float:
    return case.seconds(stage) / (c * case.tiles) - 1


def summary(all_cases: list[Case]) -> list[str]:
    lines = [
        "| pattern | " + " | ".join(f"{stage}: c, us/tile | off c of all | own lengths off by" for stage in STAGES)
    ]
    lines += ["|---|" + "---:|" * 6]
    whole = {stage: slope(all_cases, stage) for stage in STAGES}
    for pattern in PATTERNS:
        own = [case for case in all_cases if case.pattern == pattern]
        if not own:
            continue
        cells = []
        for stage in STAGES:
            c = slope(own, stage)
            worst = max(abs(off(case, stage, c)) for case in own)
            cells += [f"{c * 1e6:.2f}", f"{c / whole[stage] - 1:+.0%}", f"{worst:.0%}"]
        lines.append(f"| `{pattern}` | " + " | ".join(cells) + " |")
    lines.append("| all | " + " | ".join(f"{whole[stage] * 1e6:.2f} | | " for stage in STAGES) + " |")
    return lines


def table(all_cases: list[Case]) -> list[str]:
    heads = [f"{stage}, ms | off" for stage in STAGES]
    lines = [f"| pattern | L | full tiles | partial tiles | list, ms | {' | '.join(heads)} |", "|---|" + "---:|" * 8]
    whole = {stage: slope(all_cases, stage) for stage in STAGES}
    for case in sorted(all_cases, key=lambda case: (list(PATTERNS).index(case.pattern), case.length)):
        cells = [f"{case.seconds(stage) * 1e3:.1f} | {off(case, stage, whole[stage]):+.0%}" for stage in STAGES]
        numbers = f"{case.length} | {case.full} | {case.partial} | {case.listing * 1e3:.2f}"
        lines.append(f"| `{case.pattern}` | {numbers} | {' | '.join(cells)} |")
    return lines


def verdict(all_cases: list[Case]) -> list[str]:
    lines = []
    for stage in STAGES:
        c = slope(all_cases, stage)
        out = [case for case in all_cases if abs(off(case, stage, c)) > PROMISED]
        named = ", ".join(f"`{case.pattern}` at {case.length} ({off(case, stage, c):+.0%})" for case in out)
        lines.append(
            f"{stage}: {len(all_cases) - len(out)} of {len(all_cases)} cases within {PROMISED:.0%} of one line through "
            f"all of them{f'; not {named}' if out else ''}.\n"
        )
    return lines


def page(all_cases: list[Case], rounds: int, threads: int) -> str:
    head = [
        "# Time against visited tiles\n",
        f"`python benchmarks/patterns.py`: {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}, "
        f"{rounds} rounds, torch {torch.__version__}. Query, key, value (1, {HEADS}, L, {WIDTH}) in float32; tiles of "
        f"{GRAIN} x {GRAIN}, once for each head; medians.\n",
    ]
    return "\n".join([*head, *verdict(all_cases), *summary(all_cases), "", *table(all_cases), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter lengths and fewer rounds")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    rounds = asked.rounds or (3 if asked.quick else 7)
    all_cases = cases(QUICK if asked.quick else LENGTHS)
    measure(all_cases, rounds, time.thread_time if asked.threads == 1 else time.perf_counter)
    text = page(all_cases, rounds, asked.threads)
    print(text)
    if asked.out or not asked.quick:
        (asked.out or OUT).write_text(text)


if __name__ == "__main__":
    main()
