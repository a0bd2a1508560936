"""What the machine can do at most: multiply-adds and bf16 products a second, bytes read a second; and what it does not
do in less time than an empty call takes.

A limit is measured in every round, beside the contenders: a clock that drops or a neighbour that comes slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from . import sets
from .cases import Case, CaseInputs
from .timing import Meter

MILLISECONDS = 10.0
READING, MULTIPLY_ADDS, DOT_PRODUCTS = "reading keys and values", "float32 multiply-adds", "bf16 dot products"
EMPTY_CALL = "empty call"
T = TypeVar("T")


@dataclass(frozen=True)
class Limit:
    """name: what is measured, "float32 multiply-adds (avx2)"; unit: "FLOP/s", "B/s", or "s" for an empty call."""

    name: str
    unit: str
    meter: Meter


def limits_of(inputs: CaseInputs, instruction_set: str | None, threads: int) -> list[Limit]:
    """The limits of a case on an instruction set (None: the one in use), the case's own first.

    None is there where it is not known: without a build of the native kernels nothing here reaches it, and no number is
    made up. `own_limit` tells which of them a case is measured by.
    """
    case = inputs.case
    found = []
    if case.stage == "decode":
        meter = sets.reading((inputs.key.detach(), inputs.value.detach()), threads)
        found += [] if meter is None else [Limit(READING, "B/s", meter)]
    name = instruction_set or sets.in_use()
    if name is None or case.dtype == "float64":
        return found
    for dtype, what in _kinds(case):
        meter = _peak(dtype, instruction_set, threads)
        if meter is not None:
            found.append(Limit(f"{what} ({name.rstrip('!')})", "FLOP/s", meter))
    return found


def own_limit(case: Case, limits: Sequence[Limit]) -> Limit | None:
    """What a case's rate is compared with: reading when decoding, otherwise the fastest products of its dtype."""
    unit = "B/s" if case.stage == "decode" else "FLOP/s"
    return next((limit for limit in limits if limit.unit == unit), None)


def _peak(dtype: str, instruction_set: str | None, threads: int) -> Meter | None:
    meter = _on(instruction_set, lambda: sets.peak(dtype, threads, MILLISECONDS))
    return None if meter is None else lambda: _on(instruction_set, meter)


def in_cpu_time(meter: Meter) -> Meter:
    """The rate in a second of this thread's own time: a limit counts wall-clock seconds, in which others may run.

    Only for one thread. The clocks differ by what was taken from it between start and end.
    """

    def rate() -> float:
        wall, own = time.perf_counter(), time.thread_time()
        told = meter()
        wall, own = time.perf_counter() - wall, time.thread_time() - own
        return told * max(wall / own, 1.0) if own > 0 else told

    return rate


def _kinds(case: Case) -> list[tuple[str, str]]:
    """Kinds of products, the fastest that fits first: a set without bf16 products computes in float32."""
    wide = ("float32", MULTIPLY_ADDS)
    return [("bfloat16", DOT_PRODUCTS), wide] if case.dtype == "bfloat16" else [wide]


def _on(instruction_set: str | None, call: Callable[[], T]) -> T:
    if instruction_set is None:
        return call()
    with sets.forced(instruction_set):
        return call()
