"""What the machine can do at most: multiply-adds and bf16 products a second, bytes read a second.

A limit is measured in every round, beside the contenders: a clock that drops or a neighbour that comes slows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import sets
from .cases import Case, CaseInputs
from .timing import Meter

MILLISECONDS = 10.0
READING, MULTIPLY_ADDS, DOT_PRODUCTS = "reading keys and values", "float32 multiply-adds", "bf16 dot products"


@dataclass(frozen=True)
class Limit:
    """name: what is measured, "float32 multiply-adds (avx2)"; unit: "FLOP/s" or "B/s"."""

    name: str
    unit: str
    meter: Meter


def limits_of(inputs: CaseInputs, threads: int) -> list[Limit]:
    """The limits of a case on the instruction set in use, the case's own first.

    None is there where it is not known: without a build of the native kernels nothing here reaches it, and no number is
    made up. `own_limit` tells which of them a case is measured by.
    """
    case = inputs.case
    found = []
    if case.stage == "decode":
        meter = sets.reading((inputs.key.detach(), inputs.value.detach()), threads)
        found += [] if meter is None else [Limit(READING, "B/s", meter)]
    name = sets.in_use()
    if name is None or case.dtype == "float64":
        return found
    for dtype, what in _kinds(case):
        meter = sets.peak(dtype, threads, MILLISECONDS)
        if meter is not None:
            found.append(Limit(f"{what} ({name})", "FLOP/s", meter))
    return found


def own_limit(case: Case, limits: Sequence[Limit]) -> Limit | None:
    """What a case's rate is compared with: reading when decoding, otherwise the fastest products of its dtype."""
    unit = "B/s" if case.stage == "decode" else "FLOP/s"
    return next((limit for limit in limits if limit.unit == unit), None)


def _kinds(case: Case) -> list[tuple[str, str]]:
    """Kinds of products, the fastest that fits first: a set without bf16 products computes in float32."""
    wide = ("float32", MULTIPLY_ADDS)
    return [("bfloat16", DOT_PRODUCTS), wide] if case.dtype == "bfloat16" else [wide]
