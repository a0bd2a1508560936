"""Score and mask functions on Saccade's kernels beside compiled FlexAttention and dense attention.

    python benchmarks/flex.py [--parts scores masks program tracing memory] [--lengths 2048 8192]
                              [--functions alibi ...] [--rounds 7] [--threads 1] [--quick]
                              [--results benchmarks/results/flex.jsonl]

Contenders of a case take turns in one process, in an order that moves on by one; times are medians over the rounds, and
ratios medians of the ratios within a round. Each case is appended to `--results` as one line as soon as it is measured;
the page beside it is made of the last line of each case, so that the parts may be run one by one.

- scores: twenty score functions, forward beside compiled FlexAttention (which has no backward on a CPU), forward and
  backward beside PyTorch's eager code with autograd, up to length 4,096. "chip" is the share of the greatest
  float32 rate that this machine reaches in 2 (D + Dv) operations for each visible pair forward, 3.5 times that with
  the backward.
- masks: mask functions beside Saccade's own mask values and compiled FlexAttention, at the longest length.
- program: a function of ten operations beside no function.
- tracing: to trace and recognise a function with a new code, and again; and a call with it of one query and one key,
  less a call with ALiBi.
- memory: growth of resident memory in forward and backward, each in a process of its own, at the shortest length.

Shape legend: query, key, value (1, 4, L, 64), float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flex_cases import HEADS, SHORT, mask_functions, score_functions, ten_operations
from torch import Tensor

import saccade
from saccade import Causal, Documents, Prefix, Score, Window
from saccade.benchmark.attention.memory import environment, growth
from saccade.benchmark.attention.timing import quiet
from saccade.operator._scores._binding import _known

WIDTH = 64
DENSE = 4096  # lengths up to which dense attention is measured, which takes Lq x Lk memory
OUT = Path(__file__).parent / "results" / "flex.jsonl"
PARTS = ("scores", "masks", "program", "tracing", "memory")
Call = Callable[[], object]


def inputs_of(length: int) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]


def forward(attend: Callable[..., Tensor], inputs: list[Tensor], *args: Any) -> Call:
    detached = [tensor.detach() for tensor in inputs]

    def call() -> object:
        with torch.no_grad():
            return attend(*detached, *args)

    return call


def training(attend: Callable[..., Tensor], inputs: list[Tensor], *args: Any) -> Call:
    upstream = torch.ones_like(inputs[0])

    def call() -> object:
        for tensor in inputs:
            tensor.grad = None
        attend(*inputs, *args).backward(upstream)
        return None

    return call


def compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.cache_size_limit = 1024
    return torch.compile(flex_attention, dynamic=False)


def dense(query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor]) -> Tensor:
    """PyTorch's eager code: all scores, and autograd through the function."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import noop_mask

    with TransformGetItemToIndex():
        out: Tensor = math_attention(query, key, value, score_mod, (noop_mask,), WIDTH**-0.5, {})[0]
    return out


def take_turns(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round that nothing is kept of."""
    names, seconds = list(calls), {name: [] for name in calls}
    with quiet():
        for turn in range(rounds + 1):
            for place in range(len(names)):
                name = names[(place + turn) % len(names)]
                start = time.perf_counter()
                calls[name]()
                if turn:
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> float | None:
    """The median over the rounds of `name` / `to`."""
    if name not in seconds or to not in seconds:
        return None
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))


def working(calls: dict[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls that run, and why the others do not."""
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return {name: call for name, call in calls.items() if name not in errors}, errors


def record(part: str, case: str, length: int, calls: dict[str, Call], rounds: int, **more: Any) -> dict[str, Any]:
    calls, errors = working(calls)
    seconds = take_turns(calls, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratios = {f"{name} / {to}": ratio(seconds, name, to) for name in seconds for to in seconds if name != to}
    made = {"part": part, "case": case, "length": length, "seconds": medians, "ratios": ratios, "errors": errors}
    return {**made, "threads": torch.get_num_threads(), "torch": torch.__version__, **more}


def scores(asked: argparse.Namespace) -> Any:
    flex = compiled()
    for length in asked.lengths:
        for name, function in score_functions(length).items():
            if asked.functions and name not in asked.functions:
                continue
            torch._dynamo.reset()
            inputs = inputs_of(length)
            calls = {
                "forward": forward(saccade.flex_attention, inputs, function),
                "flex forward": forward(flex, inputs, function),
                "both": training(saccade.flex_attention, inputs, function),
            }
            if length <= DENSE:
                calls["dense both"] = training(dense, inputs, function)
            with torch.no_grad():
                plan = saccade.explain(*inputs, bias=Score(function).at(0))
            work = plan.work * HEADS * length**2 * 2 * 2 * WIDTH
            yield record("scores", name, length, calls, asked.rounds, operations=work, short=name in SHORT, peak=peak())


def own_masks(length: int) -> dict[str, Any]:
    ids = torch.arange(length) // max(length // 16, 1)
    return {"window": Window(256, 0), "documents": Causal() & Documents(ids), "prefix": Prefix(length // 4) | Causal()}


def masks(asked: argparse.Namespace) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    flex, length = compiled(), max(asked.lengths)
    inputs, values = inputs_of(length), own_masks(length)
    for name, function in mask_functions(length).items():
        block = create_block_mask(function, None, None, length, length, device="cpu")
        calls = {
            "forward": forward(saccade.flex_attention, inputs, None, block),
            "flex forward": forward(flex, inputs, None, block),
            "mask value forward": forward(saccade.attention, inputs, values[name]),
            "both": training(saccade.flex_attention, inputs, None, block),
            "mask value both": training(saccade.attention, inputs, values[name]),
        }
        yield record("masks", name, length, calls, asked.rounds)


def program(asked: argparse.Namespace) -> Any:
    for length in asked.lengths:
        inputs = inputs_of(length)
        calls = {
            "forward": forward(saccade.flex_attention, inputs, ten_operations),
            "plain forward": forward(saccade.attention, inputs),
            "both": training(saccade.flex_attention, inputs, ten_operations),
            "plain both": training(saccade.attention, inputs),
        }
        yield record("program", "ten operations", length, calls, asked.rounds)


def tracing(asked: argparse.Namespace) -> Any:
    inputs = [torch.randn(1, HEADS, 1, WIDTH) for _ in range(3)]  # one query, one key: nothing to compute
    for name in score_functions(1):
        first, again, call, none = [], [], [], []
        for _ in range(asked.rounds):
            function = _anew(name)
            first.append(_seconds(lambda made=function: _traced_and_recognised(made), 1))
            again.append(_seconds(lambda made=function: _traced_and_recognised(made), 200))
            call.append(_seconds(lambda made=function: saccade.attention(*inputs, bias=Score(made)), 200))
            none.append(_seconds(lambda: saccade.attention(*inputs, bias=saccade.ALiBi(torch.ones(HEADS))), 200))
        readings = {"first": first, "again": again, "call": call, "none": none}
        seconds = {name: statistics.median(times) for name, times in readings.items()}
        yield {"part": "tracing", "case": name, "length": 1, "seconds": seconds, "ratios": {}, "errors": {}}


def _traced_and_recognised(function: Callable[..., Tensor]) -> None:
    _known(Score(function)._trace()[0])


def _anew(name: str) -> Callable[..., Tensor]:
    """The function with a code object of its own, which no trace is known of."""
    function: Any = score_functions(1)[name]
    function.__code__ = function.__code__.replace(co_firstlineno=next(_LINES))
    return function  # type: ignore[no-any-return]


_LINES = iter(range(10**6, 2**30))


def _seconds(call: Call, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def memory(asked: argparse.Namespace) -> Any:
    length = min(asked.lengths)
    for name in asked.functions or ("alibi", "relative", "jagged"):
        grown = {}
        for who in ("both", "dense both"):
            command = [sys.executable, __file__, "--grown", name, who, str(length)]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
            grown[who] = int(done.stdout.split()[-1])
        yield {"part": "memory", "case": name, "length": length, "bytes": grown, "ratios": {}, "errors": {}}


def grown(name: str, who: str, length: int) -> int:
    """Bytes by which one forward and backward makes the process grow."""
    attend = saccade.flex_attention if who == "both" else dense
    training(attend, inputs_of(64), score_functions(64)[name])()
    return growth(training(attend, inputs_of(length), score_functions(length)[name]))[0]


def peak() -> float | None:
    """The greatest float32 rate of this machine now, operations a second."""
    from saccade.benchmark.attention.sets import peak as meter

    measure = meter("float32", torch.get_num_threads(), 200)
    return None if measure is None else measure()


# --- the page -------------------------------------------------------------------------------------------------------


def cells(row: dict[str, Any]) -> list[str]:
    ratios, seconds = row["ratios"], row.get("seconds", {})

    def times(name: str, to: str, form: str = "{:.2f}") -> str:
        found = ratios.get(f"{name} / {to}")
        return "" if found is None else form.format(found)

    def share(name: str, factor: float) -> str:
        if not row.get("peak") or name not in seconds:
            return ""
        return f"{factor * row['operations'] / seconds[name] / row['peak']:.0%}"

    def milliseconds(name: str) -> str:
        return f"{seconds[name] * 1e3:.3g}" if name in seconds else ""

    by_part = {
        "scores": lambda: [
            milliseconds("forward"),
            times("flex forward", "forward", "{:.1f}x"),
            share("forward", 1.0),
            milliseconds("both"),
            times("both", "forward"),
            share("both", 3.5),
            times("dense both", "both", "{:.1f}x"),
        ],
        "masks": lambda: [
            milliseconds("forward"),
            times("flex forward", "forward", "{:.1f}x"),
            times("forward", "mask value forward"),
            milliseconds("both"),
            times("both", "mask value both"),
        ],
        "program": lambda: [times("forward", "plain forward"), times("both", "plain both")],
        "tracing": lambda: [
            milliseconds("first"),
            f"{seconds['again'] * 1e6:.0f}",
            f"{(seconds['call'] - seconds['none']) * 1e6:.0f}",
        ],
        "memory": lambda: [
            *(f"{row['bytes'][who] / 2**20:.0f}" for who in ("both", "dense both")),
            f"{row['bytes']['dense both'] / max(row['bytes']['both'], 1):.0f}x",
        ],
    }
    return by_part[row["part"]]()


COLUMNS = {
    "scores": ("forward, ms", "faster than flex", "chip", "both, ms", "both / forward", "chip", "faster than dense"),
    "masks": ("forward, ms", "faster than flex", "/ mask value", "both, ms", "/ mask value"),
    "program": ("forward / none", "both / none"),
    "tracing": ("first time, ms", "again, us", "a call beside one with ALiBi, us"),
    "memory": ("both, MiB", "dense, MiB", "less"),
}


def page(rows: list[dict[str, Any]]) -> str:
    last = {(row["part"], row["case"], row["length"]): row for row in rows}
    lines = ["# Functions of scores and masks\n", f"`python benchmarks/flex.py`: {platform.machine()}. {_legend()}\n"]
    for part in PARTS:
        own = [row for row in last.values() if row["part"] == part]
        if not own:
            continue
        names = COLUMNS[part]
        lines += [
            f"## {part.capitalize()}\n",
            f"| case | L | {' | '.join(names)} |",
            "|---|---:|" + "---:|" * len(names),
        ]
        for row in sorted(own, key=lambda row: row["length"]):
            lines.append(f"| {row['case']} | {row['length']} | {' | '.join(cells(row))} |")
            lines += [f"| {row['case']}: {name} | | {text} |" for name, text in row["errors"].items()]
        lines.append("")
    return "\n".join(lines)


def _legend() -> str:
    return f"Query, key, value (1, {HEADS}, L, {WIDTH}) in float32; medians of interleaved rounds."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", nargs="+", type=int, default=None)
    parser.add_argument("--functions", nargs="+", default=(), help="of the parts scores and memory; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="short lengths and three rounds; nothing is written")
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--grown", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    if asked.grown:
        print(grown(asked.grown[0], asked.grown[1], int(asked.grown[2])))
        return
    asked.lengths = asked.lengths or ([256, 512] if asked.quick else [2048, 8192])
    asked.rounds = 3 if asked.quick else asked.rounds
    rows = [] if asked.quick or not asked.results.exists() else read(asked.results)
    for part in asked.parts:
        for row in globals()[part](asked):
            rows.append(row)
            print(
                f"{part:8} {row['case']:16} {row['length']:6} {' | '.join(cells(row))} {row['errors'] or ''}",
                flush=True,
            )
            if not asked.quick:
                with asked.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    if not asked.quick:
        asked.results.with_suffix(".md").write_text(page(rows), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
