"""Numbers as tables show them."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """Three significant digits, no exponent: 345, 34.5, 3.45, 0.345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{digits}f}"


def scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """`value` in the largest of the units that leaves at least 1, the smallest otherwise."""
    size, unit = next(((size, unit) for size, unit in steps if abs(value) >= size), steps[-1])
    return f"{number(value / size)} {unit}"


def duration(seconds: float) -> str:
    return scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def size(count: float) -> str:
    return scaled(count, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))


def rate(value: float, unit: str) -> str:
    """Billions a second: GFLOP/s or GB/s."""
    return f"{number(value / 1e9)} G{unit}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def length(value: int) -> str:
    """8192 as 8k, 8191 as 8191."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)
