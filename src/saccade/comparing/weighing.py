"""The peak memory of training at each length, in a process of its own for each contender, shortest length first.

What a longer call will need is foreseen from the shorter ones: a call that would take too much is not made, and where
one ends its process all the same, the others go on.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..benchmarking.memory import WARM_UP, environment, growth
from .contenders import Contender
from .data import Sizes, normal


@dataclass(frozen=True)
class Limits:
    """Beyond which a call is left out."""

    bytes: int = 4 * 2**30
    seconds: float = 10.0


class Weight(NamedTuple):
    """peak: bytes above inputs and parameters, without the gradients of inputs; None where it was not measured.

    left_out: why the contender is left out at this length; empty where it can be timed.
    """

    peak: int | None
    left_out: str = ""
    seconds: float = 0.0


def weigh(
    contender: Contender, sizes: Sizes, lengths: Sequence[int], limits: Limits, threads: int, seed: int
) -> dict[int, Weight]:
    """By length, ascending."""
    question = {
        "name": contender.name, "sizes": sizes, "lengths": lengths, "bytes": limits.bytes, "seconds": limits.seconds,
        "threads": threads, "seed": seed,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from saccade.comparing.weighing import main; main()"],
        input=json.dumps(question), capture_output=True, text=True, check=False,
        env={**environment(), "OMP_WAIT_POLICY": "PASSIVE"},  # several weigh side by side and must not spin
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    found = {entry[0]: Weight(*entry[1:]) for entry in told}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        for length in lengths:
            found.setdefault(length, Weight(None, f"the process that weighed it ended: {last[:100]}"))
    return found


def weights(contender: Contender, sizes: Sizes, lengths: Sequence[int], limits: Limits, seed: int) -> Iterator[Any]:
    """In this process: (length, *Weight) one after the other."""
    earlier: list[tuple[int, Weight]] = []
    for length in sorted(lengths):
        reason = foreseen(earlier, length, limits) or _certain(contender, sizes._replace(length=length), limits)
        weight = Weight(None, reason) if reason else _weighed(contender, sizes._replace(length=length), seed)
        if not weight.left_out:
            earlier.append((length, weight))
        yield (length, *weight)


def foreseen(earlier: Sequence[tuple[int, Weight]], length: int, limits: Limits) -> str:
    """Why a call at this length is not even tried, after what the shorter ones took; empty where it is."""
    if not earlier:
        return ""
    seconds = _expected([(before, weight.seconds) for before, weight in earlier], length, alone=1.0)
    if seconds > limits.seconds:
        return f"a call would take about {seconds:.0f} s"
    peak = _expected([(before, float(weight.peak or 0)) for before, weight in earlier], length, alone=2.0)
    return f"would form about {peak / 2**30:.1f} GiB" if peak > limits.bytes else ""


def _expected(amounts: Sequence[tuple[int, float]], length: int, alone: float) -> float:
    """Grown as between the last two lengths, and at least as L, at most as L^2; as L^alone after a single one."""
    last, amount = amounts[-1]
    power = alone
    if len(amounts) > 1 and amounts[-2][1] > 0 and amount > 0:
        power = math.log(amount / amounts[-2][1]) / math.log(last / amounts[-2][0])
    return amount * (length / last) ** min(max(power, 1.0), 2.0)


def _certain(contender: Contender, sizes: Sizes, limits: Limits) -> str:
    needs = contender.needs(sizes)
    return f"would form {needs / 2**30:.1f} GiB" if needs > limits.bytes else ""


def _weighed(contender: Contender, sizes: Sizes, seed: int) -> Weight:
    try:
        runner = contender.build(sizes, normal(sizes, seed), seed)
        training = runner.training()
        start = _now()
        peak, _ = growth(training)
        seconds = min(now - before for now, before in zip(_now(), start, strict=True))
    except OSError as error:  # a system that does not tell; times are still of use
        return Weight(None, "", 0.0) if "has no" in str(error) else Weight(None, first_line(error))
    except Exception as error:  # whatever a contender raises is its own answer
        return Weight(None, first_line(error))
    return Weight(max(peak - runner.bytes_of_inputs, 0), "", seconds)


def _now() -> tuple[float, float]:
    """On the wall, and of this process alone: what others take on a busy machine is not the call's."""
    return time.perf_counter(), time.process_time()


def first_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."


def answer(question: str) -> Iterator[str]:
    """One line of JSON for each length, as soon as it is known."""
    from .everyone import named

    asked = json.loads(question)
    torch.set_num_threads(asked["threads"])
    contender, sizes = named(asked["name"]), Sizes(*asked["sizes"])
    limits = Limits(asked["bytes"], asked["seconds"])
    _weighed(contender, sizes._replace(length=WARM_UP), asked["seed"])  # loads what a first call loads
    for entry in weights(contender, sizes, asked["lengths"], limits, asked["seed"]):
        yield json.dumps(entry)


def main() -> None:
    """Answer the question on standard input."""
    for line in answer(sys.stdin.read()):
        print(line, flush=True)
