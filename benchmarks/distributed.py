"""How much of two processes attention on shards uses: seconds of one process / (ranks x seconds of the slowest rank).

    python benchmarks/distributed.py [--ranks 2] [--rounds 5] [--length 16384] [--case NAME ...] [--part NAME ...]
                                     [--out benchmarks/results/distributed.md]

Parts: "shares" are those seconds. "torch" has context_parallel of PyTorch's torch.distributed.tensor.experimental take
turns with us, forward and without a mask: it raises errors for the
rest on CPUs. "memory" has the bytes that a rank's
process grows by in a forward and backward pass, against one process with the whole sequence. --out replaces the parts
that are run.

Every process has one thread, which keeps to one core; gloo connects them on this machine. One process with the whole
sequence and all ranks together take turns within each round, and the figures are medians over rounds. So does every
process with a whole sequence of its own: two processes slow each other down without any message. The plan is made once,
as for all layers of a model.

Shape legend: query, key, value (1, H, L, 64), float32, with H = 2 heads (causal) or 8.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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


def beside_torch(rank: int, ranks: int, length: int, rounds: int) -> Iterator[str]:
    """Lines of a table: PyTorch's context_parallel and ours, of the same rows, without a mask."""
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh, draw = init_device_mesh("cpu", (ranks,)), torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, length, WIDTH, generator=draw) for _ in range(3)]
    plans = {layout: distributed.plan(None, length, layout=layout) for layout in LAYOUTS}
    for stage in STAGES:
        theirs = [x.clone() for x in whole]
        with context_parallel(mesh, buffers=theirs, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(theirs)):
            calls = {"PyTorch": step(F.scaled_dot_product_attention, theirs, stage)}
            for layout, plan in plans.items():
                shards = [plan.shard(x).contiguous() for x in whole]
                calls[layout] = step(lambda *x, plan=plan: distributed.attention(*x, plan=plan), shards, stage)
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds + 1):
                for name, call in list(calls.items()):
                    try:
                        seconds[name].append(timed(call))
                    except NotImplementedError:  # on every rank, of an operator without a sharding strategy
                        del calls[name]
        cells = [f"{statistics.median(seconds[name][1:]) * 1e3:.1f}" if name in calls else "raises" for name in seconds]
        pairs = zip(seconds["PyTorch"][1:], seconds["ring"][1:], strict="PyTorch" in calls)
        share = f"{statistics.median(p / r for p, r in pairs):.2f}" if "PyTorch" in calls else ""
        yield f"| {stage} | {' | '.join(cells)} | {share} |"


def memory(rank: int, ranks: int, length: int) -> Iterator[str]:
    """Lines of a table: what one process, and each of the ranks, grows by; the attention alone, and a model."""
    config = saccade.models.ModelConfig(512, width=256, layers=4, heads=4, context=length)
    torch.manual_seed(0)
    model, plan = saccade.models.DecoderLM(config), distributed.plan(Causal(), length, layout="ring")
    model.requires_grad_()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    def attend(rows: int, call: Callable[..., torch.Tensor]) -> None:
        tensors = [torch.randn(1, 4, rows, WIDTH, requires_grad=True) for _ in range(3)]
        call(*tensors).sum().backward()

    def train(ids: torch.Tensor) -> None:
        model(ids).logsumexp(-1).mean().backward()

    ids, rows = torch.arange(length)[None] % 512, plan.held(rank)
    own = plan.shard(ids, 1)
    cases: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "attention": (
            lambda: attend(length, lambda *x: saccade.attention(*x, Causal())),
            lambda: attend(rows, lambda *x: distributed.attention(*x, plan=plan)),
        ),
        "4 layers": (lambda: train(ids), lambda: train(own)),
    }
    for name, (alone, shared) in cases.items():
        dist.barrier()
        single = grown(alone if rank == 0 else lambda: None)
        dist.barrier()
        with distributed.context_parallel(model, plan):
            ours = grown(shared)
        every = torch.tensor([single, ours], dtype=torch.float64)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        single, ours = every.tolist()
        share = ours * ranks / single - 1
        yield f"| {name} | {single / 2**20:.0f} | {ours / 2**20:.0f} | {share:+.1%} |"


def grown(call: Callable[[], None]) -> float:
    """Bytes of the process at their most within a call, above those before it. Linux."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: memory of tensors is given back when they are freed
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(field))


def serve(rank: int, options: Any, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # this thread; gloo's own go where there is room
    tables: dict[str, Iterator[str]] = {
        "shares": shares(rank, options),
        "torch": beside_torch(rank, options.ranks, options.length, options.rounds),
        "memory": memory(rank, options.ranks, options.length),
    }
    for part in options.part:
        lines = []
        for line in tables[part]:
            lines.append(line)
            if rank == 0:
                print(line, flush=True)
        if rank == 0 and options.out:
            write(Path(options.out), options, part, lines)
    dist.barrier()
    dist.destroy_process_group()


def shares(rank: int, options: Any) -> Iterator[str]:
    for name in options.case or MASKS:
        for row in measured(rank, options.ranks, name, options.length, options.rounds):
            figures = (f"{seconds * 1e3:.1f}" for seconds in (row.single, row.at_once, row.shared))
            verdict = "yes" if row.share >= GOALS[name] else "no"
            cells = (name, row.layout, row.stage, *figures, f"{row.share:.1%}", verdict, f"{row.share_at_once:.1%}")
            yield f"| {' | '.join(cells)} |"


def write(path: Path, options: Any, part: str, lines: list[str]) -> None:
    """Put a part's table into the file, in place of the one that is there."""
    goals = ", ".join(f"{name} {goal:.0%}" for name, goal in GOALS.items())
    run = f"{platform.machine()}, {options.ranks} processes of 1 thread, gloo, L = {options.length}"
    heads = {
        "shares": [
            "# Attention on shards",
            "",
            f"`python benchmarks/distributed.py`: {run}, {options.rounds} rounds, torch {torch.__version__}. Query, "
            f"key, value (1, H, L, {WIDTH}) in float32, H = 2 (causal) or 8; medians. Share of ideal: one process / "
            f"({options.ranks} x the slowest rank). At once: each process with a whole sequence of its own, which "
            f"shows what the machine leaves of {options.ranks} processes.",
            "",
            f"Goals: {goals}.",
            "",
            "| mask | layout | stage | one process, ms | at once, ms | together, ms | of ideal | goal | of at once |",
            "|---|---|---|---:|---:|---:|---:|---|---:|",
        ],
        "torch": [
            "# Beside PyTorch's context_parallel",
            "",
            f"`--part torch`: {run}, {options.rounds} rounds, torch {torch.__version__}; (1, 2, L, {WIDTH}) in "
            "float32, no mask; medians, in ms. On CPUs PyTorch's raises an error for causal masks and in the backward "
            "pass.",
            "",
            "| stage | PyTorch | gathered | ring | PyTorch / ring |",
            "|---|---:|---:|---:|---:|",
        ],
        "memory": [
            "# Memory of a rank",
            "",
            f"`--part memory`: {run}, causal, forward and backward; most resident memory above that before the call, "
            f"in MiB. Attention (1, 4, L, {WIDTH}) with its inputs; a `DecoderLM` of 4 layers, 256 wide, with its "
            "weights and their gradients there before.",
            "",
            "| what | one process | each rank | above 1 / ranks |",
            "|---|---:|---:|---:|",
        ],
    }
    texts = path.read_text(encoding="utf-8").split("\n# ") if path.exists() else []
    kept = {f"# {text.removeprefix('# ')}".splitlines()[0]: f"# {text.removeprefix('# ')}".rstrip() for text in texts}
    kept[heads[part][0]] = "\n".join([*heads[part], *lines])
    order = [head[0] for head in heads.values() if head[0] in kept]
    path.write_text("\n\n".join(kept[name] for name in order) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--case", nargs="*", choices=list(MASKS))
    parser.add_argument(
        "--part", nargs="*", choices=["shares", "torch", "memory"], default=["shares", "torch", "memory"]
    )
    parser.add_argument("--out", default=str(OUT))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(serve, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
