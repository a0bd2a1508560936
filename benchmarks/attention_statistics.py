"""What exact statistics of attention weights cost: beside the plain forward pass, and beside weights that are stored.

    python benchmarks/attention_statistics.py [--rounds 7] [--threads N] [--out benchmarks/results/statistics.md]

Self-attention of one item, 2 heads of width 64. The contenders take turns within each round, in an order that moves on
by one, so that what else the machine does hits all of them alike; times are medians over rounds, ratios medians of the
rounds' ratios. Before anything is timed, the statistics are checked against those of the stored weights. Memory is the
growth of the peak of a fresh process's resident memory over one call, inputs left out, results counted.

The file is not called statistics.py: Python's own module of that name would not be found from this directory.

Shape legend: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.benchmark.attention.memory import growth
from saccade.benchmark.attention.timing import median_ratio, rounds_of

HEADS, WIDTH, TOP = 2, 64, 8
LENGTHS, DTYPES = (2048, 4096, 8192), {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONG = 65_536  # one head
OUT = Path(__file__).parent / "results" / "statistics.md"

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    length: int
    causal: bool
    dtype: str
    heads: int = HEADS

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.length)
        shape = (1, self.heads, self.length, WIDTH)
        query, key, value = (torch.randn(shape, generator=generator).to(DTYPES[self.dtype]) for _ in range(3))
        return query, key, value


def forward(case: Case) -> Call:
    query, key, value = case.inputs()
    mask = saccade.Causal() if case.causal else None
    return lambda: saccade.attention(query, key, value, mask, backend="native")


def by_kernels(case: Case, received: bool, top: int) -> Call:
    query, key, _ = case.inputs()
    mask = saccade.Causal() if case.causal else None
    return lambda: saccade.statistics(query, key, mask, received=received, top=top, backend="native")


def eager(case: Case) -> Call:
    """The weights, float32, and reductions over them."""
    query, key, _ = case.inputs()
    hidden = torch.ones(case.length, case.length, dtype=torch.bool).triu(1) if case.causal else None
    positions = torch.arange(case.length, dtype=torch.float32)
    away = (positions[:, None] - positions).abs()

    def call() -> dict[str, Tensor]:
        logits = (query @ key.mT).float() * WIDTH**-0.5
        if hidden is not None:
            logits = logits.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(logits, -1)
        largest, at = weights.max(-1)
        best = weights.topk(TOP, -1)
        return {
            "lse": torch.logsumexp(logits, -1),
            "entropy": -torch.xlogy(weights, weights).sum(-1),
            "largest": largest,
            "largest_at": at,
            "distance": (weights * away).sum(-1),
            "self": weights.diagonal(0, -2, -1),
            "previous": weights.diagonal(-1, -2, -1),
            "next": weights.diagonal(1, -2, -1),
            "first": weights[..., 0],
            "received": weights.sum(-2),
            "top_weights": best.values,
            "top_keys": best.indices,
            "lowest": logits.masked_fill(logits == -torch.inf, torch.inf).amin((-2, -1)),
            "highest": logits.amax((-2, -1)),
            "smallest": weights.amin((-2, -1)),
        }

    return call


CONTENDERS: dict[str, Callable[[Case], Call]] = {
    "forward": forward,
    "statistics": lambda case: by_kernels(case, received=False, top=0),
    "with received": lambda case: by_kernels(case, received=True, top=0),
    f"with received and top {TOP}": lambda case: by_kernels(case, received=True, top=TOP),
    "stored weights": eager,
}
EVERYTHING = f"with received and top {TOP}"


def check(case: Case) -> None:
    """Equal to what the stored weights give: float32 on both sides, and products of bf16 rounded to bf16 on theirs."""
    ours, theirs = CONTENDERS[EVERYTHING](case)(), eager(case)()
    tolerance = 1e-4 if case.dtype == "float32" else 0.1
    for name in ("lse", "entropy", "largest", "distance", "received", "top_weights"):
        got, want = getattr(ours, name), theirs[name]
        far = ((got - want).abs() / (1 + want.abs())).max().item()
        assert far < tolerance, f"{case}: {name} is {far:.1e} off"


def timed(case: Case, rounds: int) -> dict[str, list[float]]:
    return rounds_of({name: make(case) for name, make in CONTENDERS.items()}, rounds)


def memory(case: Case, contender: str, threads: int) -> int:
    """Bytes, in a process of its own."""
    question = json.dumps({"case": asdict(case), "contender": contender, "threads": threads})
    command = [sys.executable, __file__, "--memory", question]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return int(done.stdout)


def answer(question: str) -> int:
    asked = json.loads(question)
    torch.set_num_threads(asked["threads"])
    make, case = CONTENDERS[asked["contender"]], Case(**asked["case"])
    make(Case(64, case.causal, case.dtype))()  # what a first call loads
    return growth(make(case))[0]


def ratio(seconds: dict[str, list[float]], name: str, other: str) -> float:
    return median_ratio(seconds[name], seconds[other])


def times_table(rounds: int) -> list[str]:
    names = list(CONTENDERS)
    lines = [
        "| L | mask | dtype | "
        + " | ".join(names[:1] + [f"{name} / forward" for name in names[1:]])
        + f" | stored weights / {EVERYTHING} |",
        "|---" * (4 + len(names)) + "|",
    ]
    for length in LENGTHS:
        for causal in (False, True):
            for dtype in DTYPES:
                case = Case(length, causal, dtype)
                check(case)
                seconds = timed(case, rounds)
                row = [f"{length}", "causal" if causal else "none", dtype, _milliseconds(seconds["forward"])]
                row += [f"{ratio(seconds, name, 'forward'):.2f}" for name in names[1:]]
                row += [f"{ratio(seconds, 'stored weights', EVERYTHING):.1f}"]
                lines.append("| " + " | ".join(row) + " |")
                print(lines[-1], flush=True)
    return lines


def _milliseconds(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ms"


def memory_table(threads: int) -> list[str]:
    lines = ["| L | heads | mask | contender | extra memory |", "|---|---|---|---|---|"]
    cases = [(Case(4096, True, "float32"), name) for name in ("forward", "statistics", EVERYTHING, "stored weights")]
    cases += [(Case(length, True, "float32", heads=1), EVERYTHING) for length in (LONG // 4, LONG // 2, LONG)]
    for case, name in cases:
        size = memory(case, name, threads)
        lines.append(f"| {case.length} | {case.heads} | causal | {name} | {size / 2**20:.1f} MiB |")
        print(lines[-1], flush=True)
    return lines


def page(rounds: int, threads: int) -> str:
    return "\n".join(
        [
            "# Statistics of attention weights",
            "",
            f"One item, {HEADS} heads of width {WIDTH}. `statistics` is `saccade.statistics` on the native kernels "
            f"without what keys receive and without the largest weights; "
            f"`stored weights` forms them in float32 and reduces them. "
            f"Medians of {rounds} rounds in which the contenders take turns; ratios are medians of the rounds' ratios.",
            "",
            f"PyTorch {torch.__version__}, {threads} thread(s), {_processor()}, instruction set "
            f"{saccade.operator._backends.native._kernels.instructions()}.",
            "",
            "    python benchmarks/attention_statistics.py",
            "",
            *times_table(rounds),
            "",
            "## Memory of one call, beyond its inputs",
            "",
            *memory_table(threads),
            "",
        ]
    )


def _processor() -> str:
    found = None
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--memory", help=argparse.SUPPRESS)  # a process of its own measures itself
    given = parser.parse_args()
    if given.memory:
        print(answer(given.memory))
        return
    torch.set_num_threads(given.threads)
    given.out.write_text(page(given.rounds, given.threads))


if __name__ == "__main__":
    main()
