"""One way to round and write a weight, so that a sentence, the map and the report never disagree."""

from __future__ import annotations

import math


def hundredths(weight: float) -> int:
    """The weight in hundredths, halves upward: 0.495 is 50."""
    return math.floor(float(weight) * 100 + 0.5)


def short_number(weight: float) -> str:
    """A weight with two decimals and no leading zero: ``.50``, ``1.00``."""
    n = hundredths(weight)
    return f"{n // 100}.{n % 100:02d}" if n >= 100 else f".{n:02d}"
