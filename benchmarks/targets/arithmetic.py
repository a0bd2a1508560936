"""How fast a case can be at most, by counting: what is multiplied, what else each pair takes, and an empty call.

    seconds >= empty call + pairs multiplied x heads x (products / their peak + operations / peak of multiply-adds)
    decoding: no fewer than bytes / reading, either

Counted in vector instructions, of which the processor is taken to do as many a second as multiply-adds: that is so
where all of them share the multipliers' ports. A processor with adders beside its multipliers may do a little better.

Shape legend: D width of query and key, Dv of value.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.benchmark.attention.cases import STAGES, Case
from saccade.benchmark.attention.machine import DOT_PRODUCTS, MULTIPLY_ADDS, READING
from saccade.benchmark.attention.results import MeasurementGroup

from .subject import EMPTY_CALL
from .tiles import multiplied_pairs

LANES = {"baseline": 4, "neon": 4, "neon_bf16": 4, "avx2": 8, "avx512": 16, "avx512_bf16": 16}  # floats in a vector
# Rows of a register tile: its smallest step is so many rows by one vector of keys. 16 registers have 4, 32 have 8.
STEP = {"baseline": 4, "neon": 8, "neon_bf16": 8, "avx2": 4, "avx512": 8, "avx512_bf16": 8}
# The exponential 2^x: its polynomial (a degree less where weights are rounded to bf16), and the steps around it. With
# AVX-512 multiply, compare, round, subtract, scale; otherwise two bounds (3), round (2), subtract, shift (2), multiply.
POLYNOMIAL, AROUND, AROUND_WITHOUT_SCALING = 5, 5, 9
# Forward: the row's maximum, its subtraction, the sum of the weights. Backward: the lse and its rest are subtracted,
# ds = p (dp - delta).
FORWARD, BACKWARD = 3, 4
# Decoding: keys stand in rows, so that each score is a vector to be summed: for as many scores as a vector has lanes,
# one addition less than that, with two shuffles each.
ACROSS = 3
# Weights rounded to bf16 for the dot products, two vectors at once; backward also ds, both interleaved, ds unpacked.
FORWARD_ROUNDING, BACKWARD_ROUNDING = 0.5, 2.5


@dataclass(frozen=True)
class Least:
    """The fewest seconds of a case, and the terms they are made of, in words."""

    seconds: float
    words: str


def operations(case: Case, instruction_set: str, dots: bool) -> float:
    """Vector operations on each vector of pairs, beside the products."""
    lanes = LANES[instruction_set]
    exponential = POLYNOMIAL - dots + (AROUND if lanes == 16 else AROUND_WITHOUT_SCALING)
    forward = FORWARD + exponential + dots * FORWARD_ROUNDING + (case.stage == "decode") * ACROSS * (lanes - 1)
    backward = BACKWARD + exponential + dots * BACKWARD_ROUNDING
    return (case.stage != "backward") * forward + case.derives * backward


def least(case: Case, group: MeasurementGroup) -> Least | None:
    """The least time by the limits measured in the case's group; None where they are not known."""
    adds, dots = group.limit(MULTIPLY_ADDS), group.limit(DOT_PRODUCTS)
    known = next((limit.name for limit in group.limits if limit.name.startswith(MULTIPLY_ADDS)), "")
    instruction_set = known[known.find("(") + 1 : -1]
    if adds is None or instruction_set not in LANES:
        return None
    lanes, empty = LANES[instruction_set], group.limit(EMPTY_CALL) or 0.0
    decode = case.stage == "decode"
    pairs = case.pairs if decode else multiplied_pairs(case, STEP[instruction_set], lanes)
    products = STAGES[case.stage] * (case.width + case.value_width)
    beside = operations(case, instruction_set, dots is not None)
    seconds = empty + 2 * pairs * case.heads * (products / (dots or adds) + beside / adds)
    kind = "dot products" if dots else "multiply-adds"
    words = [f"{beside:g} operations beside {products / (2 if dots else 1):g} {kind}"]
    if pairs > 1.005 * case.pairs:
        words.append(f"{pairs / case.pairs:.2f} pairs multiplied for each visible one")
    if empty > 0.005 * seconds:
        words.append(f"an empty call is {empty / seconds:.0%} of it")
    reading = group.limit(READING)
    if decode and reading is not None and case.bytes_read / reading > seconds:
        return Least(case.bytes_read / reading, "the bytes of keys and values")
    return Least(seconds, "; ".join(words))
