"""What each way of batching sequences of unequal length costs and saves: time, padding and memory on one model.

    python benchmarks/unequal_lengths.py [--items 96] [--rounds 5] [--out benchmarks/results/unequal-lengths.md]

Forward and backward of an encoder over the same sequences, in steps of 8 (one by one: 1). Lengths are log-normal:
median 90, sigma 0.7, cut to 8 ... 512, seed 0. The ways take turns within each round, in an order that moves on by one,
so that what else the machine does hits all of them alike; times are medians over rounds, ratios medians of the rounds'
ratios. Before anything is timed, each way's outputs and gradients are checked against one by one.

Memory is the largest sum of allocations less releases since the start of a step, as PyTorch's profiler records them:
activations and gradients on top of weights and inputs.

Shape legend: L_i length of sequence i, E width.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from saccade.batching import LengthGrouped, pack, pad, unpack, unpad
from saccade.benchmark.attention.timing import median_ratio
from saccade.nn import AttentionConfig, BlockConfig, Encoder
from saccade.positions import RotaryConfig

WIDTH, HEADS, LAYERS, BATCH = 128, 4, 2, 8
OUT = Path(__file__).parent / "results" / "unequal-lengths.md"
PAGE = Path(__file__).parents[1] / "docs" / "batching.md"  # shows the table, too

Sequences = list[Tensor]
Forward = Callable[[nn.Module, Sequences], Sequences]


@dataclass(frozen=True)
class Way:
    """How a step's sequences go through the model, and which sequences make a step."""

    name: str
    forward: Forward
    steps: list[list[int]]
    padded: bool = False


@dataclass
class Measured:
    padding: float
    seconds: list[float]
    peak: int


def lengths(items: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(90), 0.7, items)
    return drawn.astype(int).clip(8, 512).tolist()


def alone(model: nn.Module, sequences: Sequences) -> Sequences:
    return [model(sequence.unsqueeze(0)).squeeze(0) for sequence in sequences]


def padded(model: nn.Module, sequences: Sequences) -> Sequences:
    x, padding = pad(sequences)
    return unpad(model(x, padding=padding), padding)


def packed(model: nn.Module, sequences: Sequences) -> Sequences:
    row = pack(sequences)
    return unpack(model(row.row, row.mask(), offset=row.positions), row)


def nested(model: nn.Module, sequences: Sequences) -> Sequences:
    return list(model(torch.nested.as_nested_tensor(sequences, layout=torch.jagged)).unbind())


def ways(sizes: list[int]) -> list[Way]:
    order = np.random.default_rng(1).permutation(len(sizes))
    chance = [order[at : at + BATCH].tolist() for at in range(0, len(order), BATCH)]
    grouped = LengthGrouped(sizes, BATCH, report=None).batches(0)
    return [
        Way("one by one", alone, [[i] for i in order.tolist()]),
        Way("padded, random order", padded, chance, padded=True),
        Way("padded, grouped by length", padded, grouped, padded=True),
        Way("packed", packed, chance),
        Way("nested", nested, chance),
    ]


def step(model: nn.Module, way: Way, data: Sequences, targets: Sequences, chosen: list[int]) -> Sequences:
    """Forward and backward of one step; gradients add up in the weights."""
    outputs = way.forward(model, [data[i] for i in chosen])
    sum((out * targets[i]).sum() for out, i in zip(outputs, chosen, strict=True)).backward()
    return outputs


def results(model: nn.Module, way: Way, data: Sequences, targets: Sequences) -> Sequences:
    """Every sequence's output, then every weight's gradient over all of them."""
    model.zero_grad()
    outputs: dict[int, Tensor] = {}
    for chosen in way.steps:
        outputs.update(zip(chosen, (out.detach() for out in step(model, way, data, targets, chosen)), strict=True))
    return [outputs[i] for i in range(len(data))] + [weight.grad.clone() for weight in model.parameters()]


def check(model: nn.Module, every: list[Way], data: Sequences, targets: Sequences) -> None:
    """All ways compute the same: within 1e-4 of the largest value, for float32 sums over some ten thousand tokens."""
    expected = results(model, every[0], data, targets)
    for way in every[1:]:
        for got, right in zip(results(model, way, data, targets), expected, strict=True):
            error = (got - right).abs().max() / right.abs().max()
            assert error < 1e-4, f"{way.name} computes something else: {error:.1e}"


def timed(model: nn.Module, way: Way, data: Sequences, targets: Sequences) -> float:
    start = time.perf_counter()
    for chosen in way.steps:
        model.zero_grad()
        step(model, way, data, targets, chosen)
    return time.perf_counter() - start


def peak(model: nn.Module, way: Way, data: Sequences, targets: Sequences) -> int:
    """Bytes, in the step that needs most: of those tried, the ones with the longest sequence and the most tokens."""
    sizes = [[len(data[i]) for i in chosen] for chosen in way.steps]
    tried = {max(range(len(sizes)), key=lambda k: max(sizes[k])), max(range(len(sizes)), key=lambda k: sum(sizes[k]))}
    return max(_peak_of(model, way, data, targets, way.steps[k]) for k in tried)


def _peak_of(model: nn.Module, way: Way, data: Sequences, targets: Sequences, chosen: list[int]) -> int:
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(model, way, data, targets, chosen)
    # The events of the public table are sums for each operation; a peak needs every allocation in order.
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(changes).max())


def measure(items: int, rounds: int) -> tuple[list[Way], list[Measured], int]:
    torch.manual_seed(0)
    sizes = lengths(items)
    data, targets = ([torch.randn(n, WIDTH) for n in sizes] for _ in range(2))
    attention = AttentionConfig(WIDTH, HEADS, positions=RotaryConfig())
    model = Encoder(BlockConfig(attention), LAYERS)
    every = ways(sizes)
    check(model, every, data, targets)
    measured = [Measured(_padding(way, sizes), [], peak(model, way, data, targets)) for way in every]
    for turn in range(rounds):
        for k in range(len(every)):
            at = (k + turn) % len(every)
            measured[at].seconds.append(timed(model, every[at], data, targets))
    return every, measured, sum(sizes)


def _padding(way: Way, sizes: list[int]) -> float:
    if not way.padded:
        return 0.0
    held = sum(len(chosen) * max(sizes[i] for i in chosen) for chosen in way.steps)
    return 1 - sum(sizes) / held


def page(every: list[Way], measured: list[Measured], tokens: int, rounds: int) -> str:
    lines = [
        "# Batches of unequal length",
        "",
        f"Forward and backward of an encoder ({LAYERS} layers, width {WIDTH}, {HEADS} heads, rotary positions, "
        f"float32) over {len(every[0].steps)} sequences, {tokens:,} tokens: log-normal lengths with median 90 and "
        f"sigma 0.7, cut to 8 ... 512. Steps of {BATCH} sequences, except one by one. Medians of {rounds} rounds in "
        "which the ways take turns; ratios are medians of the rounds' ratios to padded, random order. All ways were "
        "checked to give equal outputs and gradients first. Memory is the peak of one step: activations and "
        "gradients, beside weights and inputs.",
        "",
        f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s), {_processor()}.",
        "",
        "    python benchmarks/unequal_lengths.py",
        "",
        *table(every, measured),
    ]
    return "\n".join(lines) + "\n"


def table(every: list[Way], measured: list[Measured]) -> list[str]:
    base = measured[1]
    lines = ["| way | padding | time | ratio | peak memory | ratio |", "|---|---|---|---|---|---|"]
    for way, one in zip(every, measured, strict=True):
        ratio = median_ratio(one.seconds, base.seconds)
        lines.append(
            f"| {way.name} | {100 * one.padding:.0f} % | {statistics.median(one.seconds):.2f} s | {ratio:.2f} | "
            f"{one.peak / 2**20:.1f} MiB | {one.peak / base.peak:.2f} |"
        )
    return lines


def table_in(text: str) -> str:
    found = re.search(r"^\| way \|(.*\n)+?(?!\|)", text, re.MULTILINE)
    assert found is not None, "no table of ways"
    return found[0]


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=96, help="how many sequences")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is timed")
    parser.add_argument("--out", type=Path, default=OUT, help="where the page goes; docs/batching.md follows")
    options = parser.parse_args(arguments)
    written = page(*measure(options.items, options.rounds), options.rounds)
    options.out.write_text(written, encoding="utf-8")
    if options.out == OUT:
        shown = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(shown.replace(table_in(shown), table_in(written)), encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
