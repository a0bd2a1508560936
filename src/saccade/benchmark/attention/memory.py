"""The peak memory of one call, measured from outside of it: each point in a process of its own.

Linux keeps the peak of a process's resident memory and lets it be reset; the growth of that peak over the call, above
the inputs, is what the call needed. Where the peak cannot be reset, the resident memory is sampled every millisecond.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .cases import Case, CaseInputs
from .checking import staged
from .contenders import Contender
from .naming import named
from .results import PeakMemory

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_UP = 64  # length of the call that loads what a first call loads


def peak_memory(case: Case, contender: Contender, threads: int) -> PeakMemory | str:
    """Memory of one call in a fresh process; a string that says why there is none."""
    question = json.dumps({"case": case.as_json(), "contender": contender.name, "threads": threads})
    done = subprocess.run(
        [sys.executable, "-c", "from saccade.benchmark.attention.memory import main; main()"],
        input=question,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"peak memory was not measured: {last[:120]}"
    return PeakMemory(**json.loads(done.stdout))


def environment() -> dict[str, str]:
    """Ours, with this very package first on the path."""
    root = str(Path(__file__).parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def answer(question: str) -> PeakMemory:
    """Measure in this process what `peak_memory` asks of it."""
    asked = json.loads(question)
    case, contender = Case(**asked["case"]), named(asked["contender"])
    torch.set_num_threads(asked["threads"])
    with contender.around():
        if not contender.compiles:  # what is compiled is compiled for one shape
            small = dataclasses.replace(
                case, length_q=min(case.length_q, WARM_UP), length_k=min(case.length_k, WARM_UP)
            )
            once = CaseInputs.make(small)
            staged(contender.forward(once), once)()
        inputs = CaseInputs.make(case)
        call = staged(contender.forward(inputs), inputs)
        if contender.compiles:
            call()
        peak, method = growth(call)
    return PeakMemory(peak, case.bytes_of_gradients, method)


def growth(call: Callable[[], object]) -> tuple[int, str]:
    """Bytes by which this process's resident memory grows at its peak while the call runs, and how that was seen.

    Raises:
        OSError: the system does not tell (it is not Linux).
    """
    _free_cached_memory()
    before = _resident("VmRSS")
    try:
        RESET.write_text("5")
    except OSError:
        return _sampled(call, before)
    kept = call()
    peak = _resident("VmHWM")
    del kept
    return max(peak - before, 0), "peak"


def _sampled(call: Callable[[], object], before: int) -> tuple[int, str]:
    done, peak = threading.Event(), before

    def sample() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _resident("VmRSS"))
            time.sleep(0.001)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        kept = call()
        peak = max(peak, _resident("VmRSS"))
        del kept
    finally:
        done.set()
        sampler.join()
    return peak - before, "sampled"


def _resident(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def _free_cached_memory() -> None:
    """Free memory that the allocator keeps would hide what the call needs; so would garbage collected meanwhile."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def main() -> None:
    """Answer the question on standard input."""
    print(json.dumps(dataclasses.asdict(answer(sys.stdin.read()))))
