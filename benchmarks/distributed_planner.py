"""How near the predictions of `saccade.distributed` and `saccade plan` come: to runs, and to a simulation of events.

    python benchmarks/distributed_planner.py runs [--ranks 2 3 4] [--rounds 3] [--length 4096] [--out FOLDER]
    python benchmarks/distributed_planner.py simulated [--ranks 64 256 1024] [--length 262144] [--texts FOLDER]

`runs`: processes of one thread each on this machine, connected by gloo. The speed of the ranks is measured by the
planner itself, in each round, beside the calls; medians over rounds. Where processes share cores, so does the measured
speed.

`simulated`: `distributed_simulation.py`, for ranks as fast as `saccade plan` supposes. `--texts` is a folder of books;
their lengths, and those of their chapters, in words, are those of packed documents. Up to 256 ranks, whole shards are
sent for comparison.

Shape legend: query, key, value (1, 8, L, 64), float32 (runs); 32 and 8 heads of width 128, bfloat16 (simulated).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from distributed_simulation import Exact, simulated

from distributed import MASKS, STAGES, WIDTH, step, timed
from saccade import Causal, Documents, Mask, Window, distributed
from saccade.distributed import CallSizes
from saccade.distributed._blocks import block_size, survey
from saccade.distributed._costs import Grid, RankSpeed, cheapest
from saccade.distributed._prediction import predicted
from saccade.distributed._speed import _measured

OUT = Path(__file__).parent / "results"
GOAL = 0.20
HEADS = 8
MOST_WHOLE = 256  # ranks between which the simulation sends whole shards
SUPPOSED = RankSpeed(4e14, 4e14, 5e10, 1e-5)  # sums in memory, which the simulation leaves out, take no time
LARGE = CallSizes(heads=32, kv_heads=8, width=128, dtype=torch.bfloat16)
CHAPTER = re.compile(r"\n\s*(?:CHAPTER|Chapter) [^\n]*\n")


# --- runs ---------------------------------------------------------------------------------------------------------


def layouts(ranks: int) -> dict[str, str | Grid]:
    found: dict[str, str | Grid] = {name: name for name in ("ring", "gathered", "ulysses")}
    return found | ({"grid 2 x 2": (2, 2)} if ranks == 4 else {})


def measured(ranks: int, name: str, length: int, rounds: int) -> Iterator[tuple[str, str, float, float]]:
    """Layout, stage, seconds and predicted seconds."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS, length, WIDTH, generator=draw) for _ in range(3)]
    plans = {n: distributed.plan(MASKS[name](length), length, layout=layout) for n, layout in layouts(ranks).items()}
    sizes = CallSizes(HEADS, width=WIDTH)
    seconds: dict[tuple[str, str], list[float]] = {}
    speeds = []
    for _ in range(rounds + 1):
        speeds.append(_measured(None, sizes))
        for (n, plan), stage in itertools.product(plans.items(), STAGES):
            shards = [plan.shard(x).contiguous() for x in whole]
            call = step(lambda *x, plan=plan: distributed.attention(*x, plan=plan), shards, stage)
            seconds.setdefault((n, stage), []).append(timed(call))
    fields = ("rate", "backward_rate", "bandwidth", "latency", "memory", "overlap")
    speed = RankSpeed(*(statistics.median(getattr(one, field) for one in speeds[1:]) for field in fields))
    for n, plan in plans.items():
        cost = predicted(plan._table, sizes, speed, [(plan.layout, plan.grid)])[0]
        for stage, said in zip(STAGES, (cost.forward, cost.seconds), strict=True):
            yield n, stage, statistics.median(seconds[n, stage][1:]), said


def serve(rank: int, ranks: int, options: Any, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    rows = []
    for name in options.case or MASKS:
        for layout, stage, taken, said in measured(ranks, name, options.length, options.rounds):
            apart = said / taken - 1
            cells = [str(ranks), name, layout, stage, f"{taken * 1e3:.1f}", f"{said * 1e3:.1f}", f"{apart:+.0%}"]
            rows.append([*cells, "yes" if abs(apart) <= GOAL else "no"])
            if rank == 0:
                print(*rows[-1], sep=" | ", flush=True)
    if rank == 0:
        Path(results).write_text("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def runs(options: Any) -> list[str]:
    lines = []
    for ranks in options.ranks or (2, 3, 4):
        with tempfile.TemporaryDirectory() as folder:
            results = f"{folder}/rows"
            torch.multiprocessing.spawn(serve, (ranks, options, f"{folder}/store", results), nprocs=ranks)
            lines += Path(results).read_text().splitlines()
    held = sum(line.endswith("| yes |") for line in lines)
    return [
        "# Predicted and measured calls on shards",
        "",
        f"`python benchmarks/distributed_planner.py runs`: {platform.machine()}, {len(os.sched_getaffinity(0))} cores, "
        f"processes of 1 thread, gloo, L = {options.length}, {options.rounds} rounds, torch {torch.__version__}. "
        f"Query, key, value (1, {HEADS}, L, {WIDTH}) in float32; medians. The prediction has the speed that the "
        f"planner measures in the same rounds. Goal: within {GOAL:.0%}, which {held} of {len(lines)} rows keep.",
        "",
        "| ranks | mask | layout | stage | measured, ms | predicted, ms | apart | goal |",
        "|---:|---|---|---|---:|---:|---:|---|",
        *lines,
    ]


# --- simulated ----------------------------------------------------------------------------------------------------


def masks(length: int, texts: Path | None) -> Iterator[tuple[str, Mask, np.ndarray]]:
    """Names, masks, and the first key that each row sees."""
    rows = np.arange(length)
    yield "causal", Causal(), np.zeros_like(rows)
    yield "window 4096", Window(4095, 0), np.maximum(rows - 4095, 0)
    files = sorted(texts.glob("*.txt")) if texts else []
    whole = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    for name, parts in (("chapters", CHAPTER.split), ("books", lambda text: [text])) if whole else ():
        sizes = np.array([count for text in whole for part in parts(text) if (count := len(part.split()))])
        sizes = np.random.default_rng(0).permutation(sizes)
        used = sizes[: 1 + np.searchsorted(np.cumsum(sizes), length)]
        ids = np.repeat(np.arange(len(used)), used)[:length]
        title = f"{name} ({len(used):,}, median {np.median(used):,.0f} words, longest {used.max():,})"
        yield title, Causal() & Documents(torch.from_numpy(ids)), np.searchsorted(ids, ids)


def compared(options: Any) -> list[str]:
    lines = []
    many = options.ranks or (64, 256, 1024)
    chosen = [case for case in masks(options.length, options.texts) if case[0].split()[0] in options.only]
    for (name, mask, first), ranks in itertools.product(chosen, many):
        table = survey(mask, options.length, block_size(options.length, ranks))
        begin = time.perf_counter()
        costs = {
            cost.layout: cost
            for cost in predicted(table, LARGE, SUPPOSED, [("ring", (1, ranks)), ("gathered", (1, ranks))])
        }
        taken = time.perf_counter() - begin
        exact = functools.partial(Exact.of, table, first, ranks)
        for layout, everything in (("ring", False), ("ring", True), ("gathered", False)):
            if everything and ranks > MOST_WHOLE:
                continue
            forward, backward = simulated(exact(everything=everything), layout, LARGE, SUPPOSED)
            cost = costs[layout]
            cells = [str(ranks), name, f"{layout}, whole shards" if everything else layout]
            cells += [f"{x * 1e3:.3g}" for x in (forward, forward + backward)]
            if not everything:
                cells += [f"{cost.forward / forward - 1:+.1%}", f"{cost.seconds / (forward + backward) - 1:+.1%}"]
            else:
                cells += ["", ""]
            cells.append("cheapest" if not everything and cost is cheapest(costs.values()) else "")
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], f"{taken:.2f} s to predict", flush=True)
    return [
        "# Predicted calls on shards, and a simulation of events",
        "",
        f"`python benchmarks/distributed_planner.py simulated`: L = {options.length}, 32 query and 8 key heads of "
        f"width 128 in bfloat16; 400 TFLOP/s, 50 GB/s, 10 us a message. Milliseconds of a forward pass, and with the "
        "backward pass, as simulated; predicted against simulated. "
        "Whole shards: every key travels, and not only those that are seen.",
        "",
        "| ranks | mask | layout | forward | with backward | predicted forward | predicted both | |",
        "|---:|---|---|---:|---:|---:|---:|---|",
        *lines,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["runs", "simulated"])
    parser.add_argument("--ranks", type=int, nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int)
    parser.add_argument("--case", nargs="*", choices=list(MASKS))
    parser.add_argument("--only", nargs="*", default=["causal", "window", "chapters", "books"], help="masks")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    options.length = options.length or (4096 if options.what == "runs" else 2**18)
    lines = runs(options) if options.what == "runs" else compared(options)
    (options.out / f"distributed_planner_{options.what}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
