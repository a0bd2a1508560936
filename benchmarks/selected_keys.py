"""What attention to selected keys costs beside exact attention: block top-k (MoBA) and Reformer's hashing.

    python benchmarks/selected_keys.py [--quick] [--threads 1] [--out benchmarks/results/selected-keys.md]

Forward, and forward with backward, of one batch item with 4 heads of width 64 in float32, causal. All take turns within
each round; times are medians, ratios medians of the rounds' ratios to `native`. Keys are random: block top-k
costs the same on any, hashing the least on these, whose buckets are even. Then the memory that a call's peak adds, with
its gradients. Before anything is timed, each is held against dense attention on a small case.

Shape legend: L length, H heads, D width.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import saccade
from saccade.benchmark.attention.memory import growth
from saccade.benchmark.attention.timing import Budget, Stopwatch, median_ratio, quiet, take_turns
from saccade.variants import block_topk_attention, lsh_attention

HEADS, WIDTH = 4, 64
OUT = Path(__file__).parent / "results" / "selected-keys.md"
Way = Callable[[Tensor, Tensor, Tensor], Tensor]
CAUSAL = saccade.Causal()


def ways(length: int) -> dict[str, Way]:
    """Calls by name; the others are measured against the first."""
    buckets = 2 * max(1, length // 64)
    return {
        "native": lambda q, k, v: saccade.attention(q, k, v, CAUSAL, backend="native"),
        "block top-k, 3 of 256": lambda q, k, v: block_topk_attention(q, k, v, CAUSAL, block=256, k=3),
        "block top-k, 3 of 512": lambda q, k, v: block_topk_attention(q, k, v, CAUSAL, block=512, k=3),
        "Reformer, 4 rounds": lambda q, k, v: lsh_attention(q, v, CAUSAL, buckets=buckets, rounds=4),
        "Reformer, 2 rounds": lambda q, k, v: lsh_attention(q, v, CAUSAL, buckets=buckets, rounds=2),
        "Reformer, 4 rounds, bidirectional": lambda q, k, v: lsh_attention(q, v, buckets=buckets, rounds=4),
    }


def inputs(length: int) -> list[Tensor]:
    """As a projection of (B, L, E) leaves them."""
    return [torch.randn(1, length, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3)]


def check() -> None:
    """AssertionError unless each is dense attention where it selects everything."""
    q, k, v = (x.detach() for x in inputs(61))
    exact = saccade.attention(q, k, v, CAUSAL)
    torch.testing.assert_close(block_topk_attention(q, k, v, CAUSAL, block=8, k=8), exact, rtol=1e-4, atol=1e-5)
    unit = q / q.norm(dim=-1, keepdim=True)
    earlier = saccade.Causal() & ~saccade.Window(0, 0)
    one = lsh_attention(q, v, CAUSAL, hashes=torch.zeros(1, HEADS, 1, 61, dtype=torch.int64), chunk=64)
    torch.testing.assert_close(one[:, :, 1:], saccade.attention(q, unit, v, earlier)[:, :, 1:], rtol=1e-4, atol=1e-5)


def measure(length: int, budget: Budget) -> list[str]:
    """Lines of the table."""
    given, upstream, asked = inputs(length), torch.randn(1, HEADS, length, WIDTH), ways(length)

    def forward(way: Way) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return way(*given)

        return call

    def both(way: Way) -> Callable[[], object]:
        return lambda: torch.autograd.grad(way(*given), given, upstream, allow_unused=True)

    lines = {name: [str(length), name] for name in asked}
    for make in (forward, both):
        meters = [Stopwatch(make(way)) for way in asked.values()]
        for meter in meters:
            meter.prepare(budget.block)
        with quiet():
            readings = dict(zip(asked, take_turns(meters, budget), strict=True))
        exact = next(iter(readings.values()))
        for name, seconds in readings.items():
            ratio = median_ratio(seconds, exact)
            lines[name] += [f"{1e3 * statistics.median(seconds):.1f}", f"{ratio:.2f}"]
    for name, way in asked.items():
        lines[name].append(f"{growth(both(way))[0] / 2**20:.0f}")
    return [f"| {' | '.join(line)} |" for line in lines.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short lengths, few rounds, nothing written")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    check()
    lengths = (1024, 4096) if asked.quick else (4096, 16384, 32768)
    budget = Budget(seconds=0.5, least=3, most=9) if asked.quick else Budget(seconds=8, least=3, most=25)
    lines = [
        "| L | what | forward, ms | of native | forward and backward, ms | of native | peak memory of both, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for length in lengths:
        lines += measure(length, budget)
    header = (
        f"Attention to selected keys: {platform.machine()}, {asked.threads} thread(s), torch {torch.__version__}, "
        f"float32, batch 1, {HEADS} heads of {WIDTH}, causal. Made by `benchmarks/selected_keys.py`."
    )
    text = "\n".join([header, "", *lines, ""])
    print(text)
    if not asked.quick:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
