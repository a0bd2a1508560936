"""What Linformer, Nystrom attention and sigmoid attention cost, beside exact attention.

    python benchmarks/few_keys.py [--quick] [--threads 1] [--out benchmarks/results/few-keys.md]

Forward, and forward with backward, of one batch item with 4 heads of width 64 in float32. All take turns within each
round, in an order that moves on by one; times are medians over rounds, ratios medians of the rounds' ratios, against
`native`. Before anything is timed, each is held against its formula on a small case.

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
from saccade.benchmark.attention.timing import Budget, Stopwatch, quiet, take_turns
from saccade.variants import linformer_attention, nystrom_attention, sigmoid_attention

HEADS, WIDTH, RANK, LANDMARKS, KERNEL = 4, 64, 256, 64, 33
OUT = Path(__file__).parent / "results" / "few-keys.md"
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def ways(length: int) -> dict[str, tuple[Way, str | None]]:
    """Calls by name, each with the name of the call that it is measured against."""
    own = torch.randn(2, HEADS, RANK, length).div_(RANK**0.5).requires_grad_()
    shared = torch.randn(1, RANK, length).div_(RANK**0.5).requires_grad_()
    weight = torch.randn(HEADS, 1, KERNEL, requires_grad=True)
    causal = saccade.Causal()
    return {
        "native": (lambda q, k, v: saccade.attention(q, k, v, backend="native"), None),
        "native, causal": (lambda q, k, v: saccade.attention(q, k, v, causal, backend="native"), None),
        "Linformer": (
            lambda q, k, v: linformer_attention(q, k, v, key_projection=own[0], value_projection=own[1]),
            "native",
        ),
        "Linformer, one projection": (lambda q, k, v: linformer_attention(q, k, v, key_projection=shared), "native"),
        "Nystrom": (lambda q, k, v: nystrom_attention(q, k, v, landmarks=LANDMARKS), "native"),
        "Nystrom, convolution": (
            lambda q, k, v: nystrom_attention(q, k, v, landmarks=LANDMARKS, convolution=weight),
            "native",
        ),
        "sigmoid": (sigmoid_attention, "native"),
        "sigmoid, causal": (lambda q, k, v: sigmoid_attention(q, k, v, causal), "native, causal"),
    }


def inputs(length: int) -> list[Tensor]:
    """As a projection of (B, L, E) leaves them."""
    return [torch.randn(1, length, HEADS, WIDTH).transpose(1, 2).requires_grad_() for _ in range(3)]


def check() -> None:
    """AssertionError unless each is its formula on a small case."""
    q, k, v = (x.detach() for x in inputs(61))
    exact = saccade.attention(q, k, v)
    one = torch.eye(61)[None]
    torch.testing.assert_close(linformer_attention(q, k, v, key_projection=one), exact, rtol=1e-4, atol=1e-5)
    whole = nystrom_attention(q.double(), k.double(), v.double(), iterations=None)
    torch.testing.assert_close(whole.float(), exact, rtol=1e-4, atol=1e-5)
    weights = torch.sigmoid(q @ k.mT / WIDTH**0.5 - torch.log(torch.tensor(61.0)))
    torch.testing.assert_close(sigmoid_attention(q, k, v), weights @ v, rtol=1e-4, atol=1e-5)


def measure(length: int, budget: Budget) -> list[str]:
    """Lines of the table."""
    given, upstream, asked = inputs(length), torch.randn(1, HEADS, length, WIDTH), ways(length)

    def forward(way: Way) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return way(*given)

        return call

    def both(way: Way) -> Callable[[], object]:
        return lambda: way(*given).backward(upstream)

    readings = []
    for stage in (forward, both):
        meters = [Stopwatch(stage(way)) for way, _ in asked.values()]
        with quiet():
            for meter in meters:
                meter.prepare(budget.block)
            readings.append(dict(zip(asked, take_turns(meters, budget), strict=True)))
    return [line(length, name, against, readings) for name, (_, against) in asked.items()]


def line(length: int, name: str, against: str | None, readings: list[dict[str, list[float]]]) -> str:
    cells = [str(length), name]
    for stage in readings:
        cells.append(f"{statistics.median(stage[name]) * 1e3:.1f}")
        rounds = [] if against is None else zip(stage[name], stage[against], strict=True)
        ratios = [other / own for own, other in rounds]
        cells.append(f"{statistics.median(ratios):.2f}x {against}" if ratios else "")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length, few rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=None, help=f"also write the table there, for example {OUT}")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    check()
    lengths = (2048,) if options.quick else (4096, 16384)
    budget = Budget(seconds=2.0, least=3) if options.quick else Budget(seconds=20.0, least=3, most=15)
    lines = [
        f"{HEADS} heads of width {WIDTH}, float32, {options.threads} threads, torch {torch.__version__}, "
        f"{platform.machine()}; rank {RANK}, {LANDMARKS} landmarks, convolution of {KERNEL}.",
        "",
        "| L | | forward ms | | forward+backward ms | |",
        "|---|---|---|---|---|---|",
    ]
    for length in lengths:
        lines += measure(length, budget)
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
