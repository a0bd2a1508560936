"""Performer against linear attention at equal feature count, forward and backward; and what each needs of memory.

    python benchmarks/performer.py [--quick] [--features 256] [--lengths 1024 4096 16384] [--markdown FILE]

Linear attention gets queries and keys as wide as Performer has features, so that both sum the same states: what
Performer takes besides is the features. CPU time of one thread, medians of rounds in which all take turns. Memory is
the growth of the process at its peak over one forward and backward pass, beside the inputs.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from saccade import Causal
from saccade.benchmark.attention.memory import growth
from saccade.benchmark.attention.timing import rounds_of
from saccade.variants import draw_projection, linear_attention, performer_attention

HEADS, WIDTH = 4, 64
KINDS = ("positive", "hyperbolic", "trigonometric")
WAYS = {"causal": Causal(), "both ways": None}
ROUNDS, QUICK_ROUNDS = 9, 3


def contenders(length: int, features: int, way: str) -> dict[str, Callable[[], object]]:
    """Each runs once, forward and backward."""
    mask = WAYS[way]

    def normal(width: int) -> Tensor:
        return torch.randn(1, HEADS, length, width, requires_grad=True)

    narrow, wide, gradient = [normal(WIDTH) for _ in range(3)], [normal(features) for _ in range(2)], normal(WIDTH)
    wide.append(narrow[2])

    def linear() -> object:
        return torch.autograd.grad(linear_attention(*wide, mask), wide, gradient.detach())

    def performer(kind: str) -> Callable[[], object]:
        vectors = draw_projection(features if kind == "positive" else features // 2, WIDTH, heads=HEADS)

        def run() -> object:
            out = performer_attention(*narrow, mask, projection=vectors, kind=kind)
            return torch.autograd.grad(out, narrow, gradient.detach())

        return run

    return {"linear": linear, **{kind: performer(kind) for kind in KINDS}}


def medians(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of CPU time; the first round is not counted."""
    return {name: statistics.median(times) for name, times in rounds_of(runs, rounds, time.thread_time).items()}


def rows(lengths: list[int], features: int, rounds: int) -> Iterator[str]:
    """Rows of the table, as they are measured."""
    for way in WAYS:
        for length in lengths:
            runs = contenders(length, features, way)
            seconds = medians(runs, rounds)
            pairs, expanded = HEADS * length**2 * 4 / 2**20, HEADS * length * features * WIDTH * 4 / 2**20
            for name, run in runs.items():
                ratio = seconds[name] / seconds["linear"]
                yield (
                    f"| {way} | {length} | {name} | {seconds[name] * 1e3:.1f} | {ratio:.2f} "
                    f"| {growth(run)[0] / 2**20:.0f} | {pairs:.0f} | {expanded:.0f} |"
                )


def heading(features: int, rounds: int) -> list[str]:
    return [
        "# Performer against linear attention",
        "",
        f"`python benchmarks/performer.py`: {platform.machine()}, one thread, medians of {rounds} rounds, "
        f"PyTorch {torch.__version__}.",
        f"{HEADS} heads of width {WIDTH}, float32, one item, forward and backward. Linear attention has {features} "
        f"features (heads of that width); Performer makes as many: {features} vectors for positive ones, "
        f"{features // 2} for the others.",
        "The last three columns are memory in MiB: what a pass needs at its peak beside its inputs, what L x L numbers "
        "would take, and what L x features x width would.",
        "",
        "| way | L | | ms | times linear | MiB | L x L | L x r x D |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--features", type=int, default=256, help="an even number")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--markdown", type=Path, help="a file to write the table to as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    lines = heading(arguments.features, rounds)
    print(*lines, sep="\n", flush=True)
    for line in rows(arguments.lengths, arguments.features, rounds):
        print(line, flush=True)
        lines.append(line)
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
