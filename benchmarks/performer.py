"""Performer against linear attention at equal feature count, forward and backward.

    python benchmarks/performer.py [--quick] [--length 4096]

Linear attention gets queries and keys as wide as Performer has features, so that both sum the same states; what
Performer takes besides is the features. CPU time of one thread, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from saccade import Causal
from saccade.variants import draw_projection, linear_attention, performer_attention

HEADS, WIDTH, FEATURES = 4, 64, 256


def contenders(length: int, causal: bool) -> dict[str, Callable[[], object]]:
    """Each runs once, forward and backward."""
    mask = Causal() if causal else None

    def normal(width: int) -> Tensor:
        return torch.randn(1, HEADS, length, width, requires_grad=True)

    narrow, wide, gradient = [normal(WIDTH) for _ in range(3)], [normal(FEATURES) for _ in range(2)], normal(WIDTH)
    wide.append(narrow[2])

    def linear() -> object:
        return torch.autograd.grad(linear_attention(*wide, mask), wide, gradient.detach())

    def performer(kind: str) -> Callable[[], object]:
        vectors = draw_projection(FEATURES if kind == "positive" else FEATURES // 2, WIDTH, heads=HEADS)

        def run() -> object:
            out = performer_attention(*narrow, mask, projection=vectors, kind=kind)
            return torch.autograd.grad(out, narrow, gradient.detach())

        return run

    return {"linear": linear, **{kind: performer(kind) for kind in ("positive", "hyperbolic", "trigonometric")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--quick", action="store_true", help="few rounds of a quarter of the length")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    length, rounds = (arguments.length // 4, 3) if arguments.quick else (arguments.length, 11)
    print(f"| L = {length} | ms | times linear |\n|---|---:|---:|")
    for causal in (True, False):
        runs = contenders(length, causal)
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for counted in [False] + [True] * rounds:
            for name, run in runs.items():
                start = time.thread_time()
                run()
                if counted:
                    taken[name].append(time.thread_time() - start)
        median = {name: statistics.median(times) for name, times in taken.items()}
        for name, seconds in median.items():
            way = "causal" if causal else "both ways"
            print(f"| {name}, {way} | {seconds * 1e3:.1f} | {seconds / median['linear']:.2f} |")


if __name__ == "__main__":
    main()
