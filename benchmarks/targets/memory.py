"""The peak memory of a call, each measured in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch

from saccade.benchmark.attention.cases import Case, CaseInputs
from saccade.benchmark.attention.checking import staged
from saccade.benchmark.attention.measuring import Entry
from saccade.benchmark.attention.memory import WARM_UP, environment, growth
from saccade.benchmark.attention.results import LimitReadings, Measurement, MeasurementGroup

from .subject import SubjectAttention

EXTRA = "peak memory above inputs and gradients"
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from targets.memory import main; main()"


def bytes_in_and_out(case: Case) -> int:
    """Bytes of query, key, value and output."""
    rows = case.heads * case.length_q * (case.width + case.value_width)
    keys = case.kv_heads * case.length_k * (case.width + case.value_width)
    return case.batch * (rows + keys) * case.torch_dtype.itemsize


def bytes_of_gradients(case: Case) -> int:
    """Bytes of the gradients of query, key and value that a call returns."""
    if not case.derives:
        return 0
    keys = case.kv_heads * case.length_k * (case.width + case.value_width)
    return case.batch * (case.heads * case.length_q * case.width + keys) * case.torch_dtype.itemsize


def weigh(title: str, entry: Entry, threads: int) -> MeasurementGroup:
    """The memory of the entry's call, without times; the row says why where there is none."""
    question = json.dumps({"case": entry.case.as_json(), "backend": entry.contender.name, "threads": threads})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1])],
        input=question,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    row = Measurement(entry.case, entry.contender.name, "none", "weighed")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return MeasurementGroup(title, (dataclasses.replace(row, note=f"not measured: {last[:120]}"),))
    return MeasurementGroup(title, (row,), (LimitReadings(EXTRA, "B", (float(done.stdout),)),))


def answer(question: str) -> int:
    """Measure in this process what `weigh` asks of it."""
    asked = json.loads(question)
    case, contender = Case(**asked["case"]), SubjectAttention(asked["backend"])
    torch.set_num_threads(asked["threads"])
    small = dataclasses.replace(case, length_q=min(case.length_q, WARM_UP), length_k=min(case.length_k, WARM_UP))
    once, inputs = CaseInputs.make(small), CaseInputs.make(case)
    staged(contender.forward(once), once)()
    peak, _ = growth(staged(contender.forward(inputs), inputs))
    return max(peak - bytes_of_gradients(case), 0)


def main() -> None:
    """Answer the question on standard input."""
    print(answer(sys.stdin.read()))
