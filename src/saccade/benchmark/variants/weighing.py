"""Measures the peak memory of training in separate processes, from the shortest length to the longest.

Needs of longer calls are predicted from shorter ones: calls that would exceed the limits are skipped. If a call ends
its process nevertheless, the next contender is measured in a new one.
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
    """Limits above which a call is skipped."""

    bytes: int = 4 * 2**30
    seconds: float = 10.0


class CallWeight(NamedTuple):
    """peak: bytes beyond inputs and parameters, without gradients of inputs; None if not measured.

    left_out: why the contender is skipped at this length; "" if it can be timed.
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
    """Peak memory by name and length. progress: called with each finished name. stop: ends the work early."""
    weights: dict[str, dict[int, CallWeight]] = {contender.name: {} for contender in who}
    left = [contender.name for contender in who]
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
        ended = _ask(question, weights, progress, stop)
        left = [name for name in left if len(weights[name]) < len(set(lengths))]
        if left and ended:  # the contender without an answer ended it; the others follow in a new process
            weights[left[0]] |= {
                length: CallWeight(None, ended) for length in lengths if length not in weights[left[0]]
            }
            progress(left.pop(0))
    return weights


def _ask(
    question: dict[str, Any], weights: dict[str, dict[int, CallWeight]], progress: Told, stop: threading.Event
) -> str:
    """Store the answers of a separate process. Returns why it ended too early, or ""."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(question)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment(), "OMP_WAIT_POLICY": "PASSIVE"},  # parallel processes must not spin
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
    return f"the process that measured its memory ended: {last[:100]}" if process.returncode else ""


def weights(
    contender: VariantContender, sizes: ProblemSizes, lengths: Sequence[int], limits: WeighingLimits, seed: int
) -> Iterator[Any]:
    """Measure in this process; yields (length, *CallWeight)."""
    earlier: list[tuple[int, CallWeight]] = []
    for length in steps(lengths):
        reason = foreseen(earlier, length, limits) or _certain(contender, sizes._replace(length=length), limits)
        weight = CallWeight(None, reason) if reason else _weighed(contender, sizes._replace(length=length), seed)
        if not weight.left_out:
            earlier.append((length, weight))
        if length in lengths:
            yield (length, *weight)


def steps(lengths: Sequence[int]) -> list[int]:
    """The lengths in ascending order, with intermediate ones if the next is more than four times as long: over larger
    gaps a prediction as L^2 would skip contenders that grow as L."""
    peaks: list[int] = []
    for length in sorted(set(lengths)):
        while peaks and length > 4 * peaks[-1]:
            peaks.append(4 * peaks[-1])
        peaks.append(length)
    return peaks


def foreseen(earlier: Sequence[tuple[int, CallWeight]], length: int, limits: WeighingLimits) -> str:
    """Why a call at this length should be skipped, predicted from shorter ones; "" if it should run."""
    if not earlier:
        return ""
    seconds = _expected([(before, weight.seconds) for before, weight in earlier], length, alone=1.0)
    if seconds > limits.seconds:
        return f"a call would take about {seconds:.0f} s"
    peak = _expected([(before, float(weight.peak or 0)) for before, weight in earlier], length, alone=2.0)
    return f"would form about {peak / 2**30:.1f} GiB" if peak > limits.bytes else ""


def _expected(amounts: Sequence[tuple[int, float]], length: int, alone: float) -> float:
    """Extrapolate the growth between the last two lengths, with an exponent from 1 to 2; a single length grows as
    L^alone."""
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
    except OSError as error:  # the system has no such information; times are still useful
        return CallWeight(None, "", 0.0) if "has no" in str(error) else CallWeight(None, first_line(error))
    except Exception as error:  # an exception of a contender becomes its answer
        return CallWeight(None, first_line(error))
    return CallWeight(max(peak - runner.bytes_of_inputs, 0), "", seconds)


def _now() -> tuple[float, float]:
    """Wall-clock time, and CPU time of this process, which other programs do not affect."""
    return time.perf_counter(), time.process_time()


def answer(question: str) -> Iterator[str]:
    """A line of JSON for each name and length."""
    from .catalogue import contender_named

    asked = json.loads(question)
    torch.set_num_threads(asked["threads"])
    sizes, limits, seed = ProblemSizes(*asked["sizes"]), WeighingLimits(asked["bytes"], asked["seconds"]), asked["seed"]
    for contender in map(contender_named, asked["names"]):
        _weighed(contender, sizes._replace(length=WARM_UP), seed)  # initialisation that happens in the first call
        for entry in weights(contender, sizes, asked["lengths"], limits, seed):
            yield json.dumps([contender.name, *entry])


def main() -> None:
    """Answer the question in the first command-line argument."""
    for line in answer(sys.argv[1]):
        print(line, flush=True)
