"""Causal linear attention against exact attention and against what others offer on a CPU.

    python benchmarks/linear_attention.py [--quick] [--out page.md]

Forward and backward (gradients of query, key and value) in float32. Whoever stands in a table takes turns with the
others, in an order that moves on by one, and a ratio is the median of the rounds' ratios. Two clocks: wall, and the
processor's seconds of all threads, which other work on the machine disturbs less. Peak memory is how far the resident
memory of a fresh process grows over a call, above its inputs.

Others are optional: pip install flash-linear-attention triton einops; performer-pytorch; linear-attention-transformer;
pytorch-fast-transformers. What is not there is named in the page. Of the first one the functions for a CPU are timed
(`naive_chunk_linear_attn`; its kernels need a GPU). Each computes elu(x) + 1 features with PyTorch, as its users do.

Nothing is written where a contender's values are further from ours in float64 than float32's rounding explains.

Shape legend: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

import saccade
from saccade import Causal
from saccade.benchmark.attention import exponent, machine
from saccade.benchmark.attention.memory import growth
from saccade.benchmark.attention.timing import median_ratio
from saccade.variants import _causal_native, linear_attention

OUT = Path(__file__).parent / "results" / "linear-attention.md"
BATCH, HEADS, WIDTH, LONG = 1, 4, 64, 16384
LENGTHS = (1024, 4096, 16384, 65536, 131072)
ROUNDING = 1e-4  # of values near 1, which are averages: some others add 1e-6 and 1e-10 to the sum of weights

Read = Callable[[Tensor, Tensor, Tensor], Tensor]


class Contender(NamedTuple):
    name: str
    read: Read
    exact: bool = False  # softmax attention: another function


def features(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def by_pytorch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Ours without the kernel."""
    takes, _causal_native.takes = _causal_native.takes, lambda *tensors: False
    try:
        return linear_attention(query, key, value, Causal())
    finally:
        _causal_native.takes = takes


def flash_linear_attention() -> Read:
    naive = importlib.import_module("fla.ops.linear_attn.naive").naive_chunk_linear_attn

    def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (features(query), features(key), value))
        return naive(query, key, value, scale=1.0, normalize=True).transpose(1, 2)

    return read


def performer_pytorch() -> Read:
    noncuda = importlib.import_module("performer_pytorch.performer_pytorch").causal_linear_attention_noncuda
    # Its chunk_size is a number of chunks: the same 64 tokens in each.
    return lambda query, key, value: noncuda(features(query), features(key), value, chunk_size=query.shape[2] // 64)


def fast_transformers() -> Read:
    product = importlib.import_module("fast_transformers.causal_product").causal_dot_product

    def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`CausalLinearAttention.forward` without its layout."""
        query, key = features(query), features(key)
        weights = torch.einsum("nhli,nhli->nhl", query, key.cumsum(2)) + 1e-6
        return product(query.contiguous(), key.contiguous(), value.contiguous()) / weights[..., None]

    return read


OTHERS = {
    "flash-linear-attention": flash_linear_attention,
    "performer-pytorch": performer_pytorch,
    "pytorch-fast-transformers": fast_transformers,
}
LEFT_OUT = (
    "linear-attention-transformer reads whole blocks of the past only (its blind spot), which is another function; "
    "with blocks of one token it is the same but keeps L x D x D numbers."
)


def others() -> tuple[list[Contender], list[str]]:
    """The implementations that can be imported, and the reasons why the others cannot."""
    found, missing = [], []
    for name, load in OTHERS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there is no GPU
                read = load()
        except Exception as error:  # what stands in the way of an import is not for us to say
            missing.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        found.append(Contender(f"{name} {version(name)}", read))
    return found, missing


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


OURS = Contender("saccade, kernel", lambda q, k, v: linear_attention(q, k, v, Causal()))
PLAIN = Contender("saccade, PyTorch", by_pytorch)
EXACT = Contender("exact, native", lambda q, k, v: saccade.attention(q, k, v, Causal(), backend="native"), exact=True)


def drawn(length: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(length)
    inputs = [torch.randn(BATCH, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    return inputs, torch.randn(BATCH, HEADS, length, WIDTH)


def both_ways(read: Read, length: int) -> Callable[[], tuple[Tensor, ...]]:
    inputs, cotangent = drawn(length)
    return lambda: torch.autograd.grad(read(*inputs), inputs, cotangent)


class Times(NamedTuple):
    """Seconds of each round."""

    wall: list[float]
    cpu: list[float]


def take_turns(calls: list[Callable[[], object]], rounds: int) -> list[Times]:
    times = [Times([], []) for _ in calls]
    for call in calls:
        call()
    for turn in range(rounds):
        for place in range(len(calls)):
            which = (place + turn) % len(calls)
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            calls[which]()
            times[which].wall.append(time.perf_counter() - wall)
            times[which].cpu.append(time.process_time() - cpu)
    return times


def check(contenders: list[Contender]) -> None:
    """All compute one function."""
    inputs, _ = drawn(512)
    with torch.no_grad():
        expected = linear_attention(*(x.double() for x in inputs), Causal())
        for contender in contenders:
            error = float((contender.read(*inputs).double() - expected).abs().max())
            if not (contender.exact or error <= ROUNDING):
                raise SystemExit(f"{contender.name} is {error:.1e} from the exact values: nothing is written")


def memory_of(name: str, length: int) -> int:
    """Bytes, in a process of its own."""
    code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['answer']({name!r}, {length})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def answer(name: str, length: int) -> None:
    read = {one.name: one.read for one in (OURS, PLAIN, EXACT)}[name]
    both_ways(read, 64)()
    print(json.dumps(growth(both_ways(read, length))[0]))


def work(length: int) -> float:
    """FLOP forward and backward with chunks of 64, as _causal.py counts them."""
    chunk = 64
    forward, backward = 4 * chunk * WIDTH + 4 * WIDTH**2, 10 * chunk * WIDTH + 10 * WIDTH**2
    return float(BATCH * HEADS * length * (forward + backward))


def by_length(lengths: tuple[int, ...], rounds: int) -> list[str]:
    rows, seconds, peaks = [], {OURS.name: [], PLAIN.name: []}, {OURS.name: [], PLAIN.name: []}
    for length in track(lengths, "lengths"):
        pair = (OURS, PLAIN)
        times = take_turns([both_ways(one.read, length) for one in pair], rounds)
        for one, taken in zip(pair, times, strict=True):
            wall, cpu = statistics.median(taken.wall), statistics.median(taken.cpu)
            peak, each = memory_of(one.name, length), 1e9 * cpu / (length * BATCH * HEADS)
            seconds[one.name].append(cpu)
            peaks[one.name].append(peak)
            rows.append(
                f"| {length:,} | {one.name} | {1e3 * wall:.1f} | {1e3 * cpu:.1f} | {each:.0f} | "
                f"{work(length) / cpu / 1e9:.0f} | {peak / 2**20:.1f} |"
            )
    head = [
        "| L | | wall ms | CPU ms | CPU ns a token and head | GFLOP a CPU second | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    fits = [
        f"Exponents of {name}: time L^{exponent(lengths, seconds[name]):.2f}, "
        f"memory L^{exponent(lengths, peaks[name]):.2f}."
        for name in seconds
    ]
    return [*head, *rows, "", *fits]


def against(others: list[Contender], rounds: int) -> list[str]:
    contenders = [OURS, PLAIN, EXACT, *others]
    check(contenders)
    times = take_turns([both_ways(one.read, LONG) for one in track(contenders, "contenders")], rounds)
    rows = [
        f"| {one.name} | {1e3 * statistics.median(taken.wall):.0f} | {1e3 * statistics.median(taken.cpu):.0f} | "
        f"{median_ratio(taken.wall, times[0].wall):.2f} | {median_ratio(taken.cpu, times[0].cpu):.2f} |"
        for one, taken in zip(contenders, times, strict=True)
    ]
    head = ["| | wall ms | CPU ms | wall / ours | CPU / ours |", "|---|---|---|---|---|"]
    best = min(range(3, len(contenders)), key=lambda n: statistics.median(times[n].cpu), default=None)
    named = (
        "No other implementation could be imported."
        if best is None
        else f"The best other one: {contenders[best].name}."
    )
    return [*head, *rows, "", named]


def page(quick: bool) -> str:
    found, missing = others()
    made = machine.describe(saccade.__version__, torch.get_num_threads())
    lengths, rounds = (LENGTHS[:3], 3) if quick else (LENGTHS, 9)
    absent = [f"Not there: {reason}." for reason in missing]
    setting = (
        f"elu(x) + 1 features, forward and backward, float32, B = {BATCH}, H = {HEADS}, D = Dv = {WIDTH}. Medians of "
        f"{rounds} interleaved rounds; ratios are medians of the rounds' ratios. CPU is the time of all threads."
    )
    where = (
        f"{made['processor']}, {made['threads']} thread(s), instruction set of the kernels: {made['instruction_set']}; "
        f"PyTorch {made['torch']}, Saccade {made['saccade']}; {made['date']}, load before {made['load_before']}."
    )
    command = "    python benchmarks/linear_attention.py" + (" --quick" if quick else "")
    compared = [
        f"## Against exact attention and others, L = {LONG:,}",
        "",
        *against(found, rounds),
        "",
        *absent,
        LEFT_OUT,
    ]
    lines = ["# Causal linear attention", "", setting, "", where, "", command, "", *compared, ""]
    return "\n".join([*lines, "## By length", "", *by_length(lengths, rounds), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, up to 16,384 tokens")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    text = page(asked.quick)
    asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
