"""The peak memory of training at each length, in processes of their own, shortest length first.

What a longer call will need is foreseen from the shorter ones: a call that would take too much is not made, and where
one ends its process all the same, the next goes on in another.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..attention.memory import WARM_UP, environment, growth
from ..attention.timing import first_line
from .contenders import VariantContender
from .data import ProblemSizes, normal

Told = Callable[[str], None]
PROGRAM = "from saccade.benchmark.variants.weighing import main; main()"


@dataclass(frozen=True)
class WeighingLimits:
    """Beyond which a call is left out."""

    bytes: int = 4 * 2**30
    seconds: float = 10.0


class CallWeight(NamedTuple):
    """peak: bytes above inputs and parameters, without the gradients of inputs; None where it was not measured.

    left_out: why the contender is left out at this length; empty where it can be timed.
    """

    peak: int | None
    left_out: str = ""
    seconds: float = 0.0


def weigh(
    who: Sequence[VariantContender],
    sizes: ProblemSizes,
    lengths: Sequence[int],
    limits: WeighingLimits,
    threads: int,
    seed: int,
    progress: Told,
    stop: threading.Event,
) -> dict[str, dict[int, CallWeight]]:
    """By name and length, ascending. told: is called with each name when its turn is over. stop: ends it early."""
    found: dict[str, dict[int, CallWeight]] = {one.name: {} for one in who}
    left = [one.name for one in who]
    while left and not stop.is_set():
        question = {
            "names": left,
            "sizes": sizes,
            "lengths": lengths,
            "bytes": limits.bytes,
            "seconds": limits.seconds,
            "threads": threads,
            "seed": seed,
        }
        ended = _ask(question, found, progress, stop)
        left = [name for name in left if len(found[name]) < len(set(lengths))]
        if left and ended:  # it ended with the first that has no answer, and the next goes on
            found[left[0]] |= {length: CallWeight(None, ended) for length in lengths if length not in found[left[0]]}
            progress(left.pop(0))
    return found


def _ask(
    question: dict[str, Any], weights: dict[str, dict[int, CallWeight]], progress: Told, stop: threading.Event
) -> str:
    """Fill in what a process of its own answers; why it ended before it was through, empty where it was."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(question)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), "OMP_WAIT_POLICY": "PASSIVE"},  # several weigh side by side and must not spin
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if stop.is_set():
                process.kill()
                break
            name, length, *weight = json.loads(line)
            weights[name][length] = CallWeight(*weight)
            if len(weights[name]) == len(set(question["lengths"])):
                progress(name)
        words = process.stderr.read().strip().splitlines()
    last = (words or [f"exit status {process.returncode}"])[-1]
    return f"the process that weighed it ended: {last[:100]}" if process.returncode else ""


def weights(
    contender: VariantContender, sizes: ProblemSizes, lengths: Sequence[int], limits: WeighingLimits, seed: int
) -> Iterator[Any]:
    """In this process: (length, *Weight) one after the other."""
    earlier: list[tuple[int, CallWeight]] = []
    for length in steps(lengths):
        reason = foreseen(earlier, length, limits) or _certain(contender, sizes._replace(length=length), limits)
        weight = CallWeight(None, reason) if reason else _weighed(contender, sizes._replace(length=length), seed)
        if not weight.left_out:
            earlier.append((length, weight))
        if length in lengths:
            yield (length, *weight)


def steps(lengths: Sequence[int]) -> list[int]:
    """The lengths, ascending, and others between them where the next is more than four times as long: what is foreseen
    over a wider gap, as L^2, would leave out what grows as L."""
    found: list[int] = []
    for length in sorted(set(lengths)):
        while found and length > 4 * found[-1]:
            found.append(4 * found[-1])
        found.append(length)
    return found


def foreseen(earlier: Sequence[tuple[int, CallWeight]], length: int, limits: WeighingLimits) -> str:
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


def _certain(contender: VariantContender, sizes: ProblemSizes, limits: WeighingLimits) -> str:
    needs = contender.needs(sizes)
    return f"would form {needs / 2**30:.1f} GiB" if needs > limits.bytes else ""


def _weighed(contender: VariantContender, sizes: ProblemSizes, seed: int) -> CallWeight:
    try:
        runner = contender.build(sizes, normal(sizes, seed), seed)
        training = runner.training()
        start = _now()
        peak, _ = growth(training)
        seconds = min(now - before for now, before in zip(_now(), start, strict=True))
    except OSError as error:  # a system that does not tell; times are still of use
        return CallWeight(None, "", 0.0) if "has no" in str(error) else CallWeight(None, first_line(error))
    except Exception as error:  # whatever a contender raises is its own answer
        return CallWeight(None, first_line(error))
    return CallWeight(max(peak - runner.bytes_of_inputs, 0), "", seconds)


def _now() -> tuple[float, float]:
    """On the wall, and of this process alone: what others take on a busy machine is not the call's."""
    return time.perf_counter(), time.process_time()


def answer(question: str) -> Iterator[str]:
    """One line of JSON for each name and length, as soon as it is known."""
    from .catalogue import contender_named

    asked = json.loads(question)
    torch.set_num_threads(asked["threads"])
    sizes, limits, seed = ProblemSizes(*asked["sizes"]), WeighingLimits(asked["bytes"], asked["seconds"]), asked["seed"]
    for contender in map(contender_named, asked["names"]):
        _weighed(contender, sizes._replace(length=WARM_UP), seed)  # loads what a first call loads
        for entry in weights(contender, sizes, asked["lengths"], limits, seed):
            yield json.dumps([contender.name, *entry])


def main() -> None:
    """Answer the question in the first argument."""
    for line in answer(sys.argv[1]):
        print(line, flush=True)
