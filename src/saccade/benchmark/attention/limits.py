"""The machine's limits: multiply-adds and bf16 products per second, and bytes read per second.

Limits are measured in every round between the contenders, so that clock changes and other load affect both.
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
    """The limits for a case with the active instruction set, the relevant one first.

    Limits that cannot be measured, such as without native kernels, are missing. `own_limit` selects the one that a case
    is compared with.
    """
    case = inputs.case
    limits = []
    if case.stage == "decode":
        meter = sets.reading((inputs.key.detach(), inputs.value.detach()), threads)
        limits += [] if meter is None else [Limit(READING, "B/s", meter)]
    name = sets.in_use()
    if name is None or case.dtype == "float64":
        return limits
    for dtype, what in _kinds(case):
        meter = sets.peak(dtype, threads, MILLISECONDS)
        if meter is not None:
            limits.append(Limit(f"{what} ({name})", "FLOP/s", meter))
    return limits


def own_limit(case: Case, limits: Sequence[Limit]) -> Limit | None:
    """The limit to compare a case with: reading for decoding, otherwise the fastest products of its dtype."""
    unit = "B/s" if case.stage == "decode" else "FLOP/s"
    return next((limit for limit in limits if limit.unit == unit), None)


def _kinds(case: Case) -> list[tuple[str, str]]:
    """Kinds of products, fastest first; instruction sets without bf16 products compute in float32."""
    wide = ("float32", MULTIPLY_ADDS)
    return [("bfloat16", DOT_PRODUCTS), wide] if case.dtype == "bfloat16" else [wide]
