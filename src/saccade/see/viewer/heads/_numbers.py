"""How the numbers of one map are written: alike, with their signs."""

from __future__ import annotations

import math
from collections.abc import Iterable

DOT = "·"


def decimals(most: float) -> int:
    """As many as show three digits of the largest number, two at least."""
    return max(2, min(9, 2 - math.floor(math.log10(most)))) if most > 0 else 2


def short(value: float, digits: int) -> str:
    """+.12, -.03; a dot for what rounds to 0, nothing for NaN."""
    if math.isnan(value):
        return ""
    text = f"{value:+.{digits}f}"
    return DOT if float(text) == 0 else text.replace("0.", ".", 1) if text[1:3] == "0." else text


def legend(values: Iterable[float], digits: int) -> str:
    """What the dot stands for, where one of these numbers has it; else nothing."""
    least = f"{0.5 * 10**-digits:.{digits + 1}f}".lstrip("0")
    return f"{DOT} is 0, to within {least}" if any(short(value, digits) == DOT for value in values) else ""
