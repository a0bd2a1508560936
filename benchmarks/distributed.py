"""How much of two processes attention on shards uses: seconds of one process / (ranks x seconds of the slowest rank).

    python benchmarks/distributed.py [--ranks 2] [--rounds 5] [--length 16384] [--case NAME ...]
                                     [--out benchmarks/results/distributed.md]

Every process has one thread, which keeps to one core; gloo connects them on this machine. One process with the whole
sequence and all ranks together take turns within each round, and the figures are medians over rounds. So does every
process with a whole sequence of its own: two processes slow each other down without any message. The plan is made once,
as for all layers of a model.

Shape legend: query, key, value (1, H, L, 64), float32, with H = 2 heads (causal) or 8.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import saccade
from saccade import Causal, Documents, Mask, Window, distributed

WIDTH = 64
HEADS = {"causal": 2, "documents": 8, "window": 8}
OUT = Path(__file__).parent / "results" / "distributed.md"
GOALS = {"causal": 0.92, "documents": 0.90, "window": 0.85}
STAGES = ("forward", "forward + backward")
LAYOUTS = ("gathered", "ring")


def documents(length: int) -> Mask:
    """Packed documents of 200 to 3,000 tokens."""
    sizes = torch.randint(200, 3001, (length // 200 + 1,), generator=torch.Generator().manual_seed(0))
    return Causal() & Documents(torch.repeat_interleave(torch.arange(len(sizes)), sizes)[:length])


MASKS: dict[str, Callable[[int], Mask]] = {
    "causal": lambda length: Causal(),
    "documents": documents,
    "window": lambda length: Window(1023, 0),
}


def timed(call: Callable[[], None]) -> float:
    """Seconds of the slowest rank, on every rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def step(attend: Callable[..., torch.Tensor], tensors: list[torch.Tensor], stage: str) -> Callable[[], None]:
    """One call, with its backward pass where the stage has one."""

    def run() -> None:
        if stage == STAGES[0]:
            with torch.no_grad():
                attend(*tensors)
            return
        out = attend(*(x.requires_grad_() for x in tensors))
        torch.autograd.grad(out, tensors, torch.ones_like(out))

    return run


@dataclass
class Row:
    """Median seconds of a mask and stage under one layout."""

    layout: str
    stage: str
    single: float  # one process with the whole sequence
    at_once: float  # every process with the whole sequence, at the same time
    shared: float
    share: float  # single / (ranks x shared), median of the rounds
    share_at_once: float  # at_once / (ranks x shared), likewise


def measured(rank: int, ranks: int, name: str, length: int, rounds: int) -> Iterator[Row]:
    """Every stage and layout of a mask."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS[name], length, WIDTH, generator=draw) for _ in range(3)]
    mask = MASKS[name](length)
    plans = {layout: distributed.plan(mask, length, layout=layout) for layout in LAYOUTS}
    for stage in STAGES:
        calls: dict[str, Callable[[], None]] = {}
        for layout, plan in plans.items():
            shards = [plan.shard(x).contiguous() for x in whole]
            calls[layout] = step(lambda *x, plan=plan: distributed.attention(*x, plan=plan), shards, stage)
        alone = step(lambda *x: saccade.attention(*x, mask), whole, stage)
        seconds: dict[str, list[float]] = {kind: [] for kind in ("single", "at once", *LAYOUTS)}
        for _ in range(rounds + 1):
            seconds["single"].append(timed(alone if rank == 0 else lambda: None))
            seconds["at once"].append(timed(alone))
            for layout, call in calls.items():
                seconds[layout].append(timed(call))
        single, at_once = seconds["single"][1:], seconds["at once"][1:]
        for layout in LAYOUTS:
            taken = seconds[layout][1:]
            shares = (
                statistics.median(whole / (ranks * shared) for whole, shared in zip(of, taken, strict=True))
                for of in (single, at_once)
            )
            yield Row(layout, stage, *map(statistics.median, (single, at_once, taken)), *shares)


def serve(rank: int, options: Any, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # this thread; gloo's own go where there is room
    lines = []
    for name in options.case or MASKS:
        for row in measured(rank, options.ranks, name, options.length, options.rounds):
            figures = (f"{seconds * 1e3:.1f}" for seconds in (row.single, row.at_once, row.shared))
            verdict = "yes" if row.share >= GOALS[name] else "no"
            cells = (name, row.layout, row.stage, *figures, f"{row.share:.1%}", verdict, f"{row.share_at_once:.1%}")
            lines.append(f"| {' | '.join(cells)} |")
            if rank == 0:
                print(lines[-1], flush=True)
    if rank == 0 and options.out:
        write(Path(options.out), options, lines)
    dist.barrier()
    dist.destroy_process_group()


def write(path: Path, options: Any, lines: list[str]) -> None:
    goals = ", ".join(f"{name} {goal:.0%}" for name, goal in GOALS.items())
    head = [
        "# Attention on shards",
        "",
        f"`python benchmarks/distributed.py`: {platform.machine()}, {options.ranks} processes of 1 thread, gloo, "
        f"L = {options.length}, {options.rounds} rounds, torch {torch.__version__}. Query, key, value "
        f"(1, H, L, {WIDTH}) in float32, H = 2 (causal) or 8; medians. Share of ideal: one process / "
        f"({options.ranks} x the slowest rank). At once: each process with a whole sequence of its own, which shows "
        f"what the machine leaves of {options.ranks} processes.",
        "",
        f"Goals: {goals}.",
        "",
        "| mask | layout | stage | one process, ms | at once, ms | together, ms | of ideal | goal | of at once |",
        "|---|---|---|---:|---:|---:|---:|---|---:|",
    ]
    path.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--case", nargs="*", choices=list(MASKS))
    parser.add_argument("--out", default=str(OUT))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(serve, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
