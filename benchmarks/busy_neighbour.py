"""What a busy neighbour costs: attention beside a process that computes, and beside F.scaled_dot_product_attention.

    python benchmarks/busy_neighbour.py [--rounds 120] [--threads 2] [--out benchmarks/results/busy-neighbour.md]

Full forwards of 8 heads of width 64 in float32. The two take turns, five calls each, with the machine idle and with one
process that only computes, twice each. Costs are differences in milliseconds to the same contender's idle calls: of
the mean, and of the 99th percentile to the idle median.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

import saccade
from saccade.benchmark.attention.machine import describe
from saccade.benchmark.attention.tables import machine_line
from saccade.benchmark.attention.timing import quiet

LENGTHS, CALLS = (512, 2048), 5
OUT = Path(__file__).parent / "results" / "busy-neighbour.md"


@contextlib.contextmanager
def busy() -> Iterator[None]:
    neighbour = subprocess.Popen([sys.executable, "-c", "x = 1.0\nwhile True: x *= 1.0000001"])
    try:
        time.sleep(0.5)  # it has started
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def measured(length: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by contender."""
    query, key, value = torch.randn(3, 1, 8, length, 64)
    calls: dict[str, Callable[[], object]] = {
        "saccade.attention": lambda: saccade.attention(query, key, value),
        "F.sdpa": lambda: F.scaled_dot_product_attention(query, key, value),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    with quiet():
        for _ in range(rounds):
            for name, call in calls.items():
                call()  # the caches are full of the other's data
                for _ in range(CALLS):
                    start = time.perf_counter()
                    call()
                    found[name].append(1e3 * (time.perf_counter() - start))
    return found


def row(length: int, name: str, idle: list[float], loaded: list[float]) -> str:
    usual, late = statistics.median(idle), statistics.quantiles(loaded, n=100)[-1]
    cells = [f"{length:,}", name, f"{usual:.2f}", f"{statistics.mean(loaded):.2f}", f"{late:.2f}"]
    cells += [f"{statistics.mean(loaded) - statistics.mean(idle):.2f}", f"{late - usual:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120, help="of 512 keys; a fifth as many of 2,048")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = [
        "# A busy neighbour",
        "",
        "    python benchmarks/busy_neighbour.py",
        "",
        machine_line(describe(saccade.__version__, options.threads)) + ".",
        "",
        "Milliseconds. Costs are against idle calls: of the mean, and of the 99th percentile against the idle median.",
        "",
        "| L | | idle, median | busy, mean | busy, 99th percentile | cost, mean | cost, 99th percentile |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in LENGTHS:
        rounds = options.rounds if length == LENGTHS[0] else max(1, options.rounds // 5)
        idle: dict[str, list[float]] = {}
        loaded: dict[str, list[float]] = {}
        for found, around in ((idle, contextlib.nullcontext), (loaded, busy)) * 2:
            with around():
                for name, times in measured(length, rounds).items():
                    found.setdefault(name, []).extend(times)
        lines += [row(length, name, idle[name], loaded[name]) for name in idle]
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
