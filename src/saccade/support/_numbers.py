"""Numbers as text for tables, reports and sentences: one function for each format, named after it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import SupportsFloat

DOT = "·"  # a number that rounds to 0, among others

# --- plain ----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits, no exponent: 345, 34.5, 3.45, 0.345."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{digits}f}"


def compact(value: float) -> str:
    """Three significant digits without more zeros than that takes; below 0.001 one digit and an exponent."""
    if value and abs(value) < 0.001:
        return f"{value:.0e}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.4g}"


def three_decimals(value: float) -> str:
    """0.500, 12.345; four significant digits from 1000 on."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def signed(value: float) -> str:
    """+1.234, -0.012."""
    return f"{value:+.3f}"


def without_zero(text: str) -> str:
    """A number's text without the zero before its point: .50, -.50, +.50."""
    return text.replace("0.", ".", 1) if text.lstrip("+-").startswith("0.") else text


def hundredths(weight: float) -> int:
    """A weight in hundredths, with halves rounded up: 0.495 is 50.

    Example:
        >>> from saccade.inspection import hundredths
        >>> hundredths(0.495), hundredths(0.494)
        (50, 49)
    """
    return math.floor(float(weight) * 100 + 0.5)


def short_number(weight: float) -> str:
    """A weight with two decimals and no leading zero, with halves rounded up: ``.50``, ``1.00``; a dash for NaN.

    Example:
        >>> from saccade.inspection import short_number
        >>> short_number(0.495), short_number(1.0)
        ('.50', '1.00')
    """
    weight = float(weight)
    if not math.isfinite(weight):
        return "-"
    return without_zero(f"{math.copysign(hundredths(abs(weight)) / 100, weight):.2f}")


def decimals_for(largest: float) -> int:
    """The number of decimals that shows three digits of the largest of several numbers, two at least."""
    return max(2, min(9, 2 - math.floor(math.log10(largest)))) if largest > 0 else 2


def signed_cell(value: float, digits: int) -> str:
    """+.12, -.03; a dot for a number that rounds to 0, nothing for NaN."""
    if math.isnan(value):
        return ""
    text = f"{value:+.{digits}f}"
    return DOT if float(text) == 0 else without_zero(text)


def fixed(value: float, digits: int) -> str:
    """`value` with `digits` decimals and without a minus before 0. If `digits` is above 3, a whole number has no
    decimals. The value of a hidden pair, -inf, becomes −∞."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "−∞" if value < 0 else "∞"
    if value and abs(value) >= 10**7:
        return f"{value:.3e}"
    if value == int(value) and digits > 3:
        return str(int(value))  # the numbers of an example by hand
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if not float(text) else text


def typeset(value: float) -> str:
    """The number for a picture: two decimals, one from 10 on, none from 100 on, and a true minus sign."""
    size = abs(value)
    return fixed(value, 0 if size >= 99.5 else 1 if size >= 9.95 else 2).replace("-", "−")


def rounded(value: SupportsFloat, digits: int = 3) -> float:
    """The number that so many significant digits show."""
    return float(f"{float(value):.{digits}g}")


# --- shares ---------------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """72 %, 3.1 %: one decimal below 10 %."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"


def percent_rounded_down(share: float) -> str:
    """Rounded down, so that 100 % means all."""
    return f"{int(share * 1000 + 1e-9) / 10:g} %"


def relative_error(error: float) -> str:
    """6.4 %, or 3e-07 where it is rounding."""
    return percent(error) if error >= 5e-4 else f"{error:.0e}"


# --- with units -----------------------------------------------------------------------------------------------------


def scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    """`value` in the largest of the units that leaves at least 1, the smallest otherwise."""
    size, unit = next(((size, unit) for size, unit in steps if abs(value) >= size), steps[-1])
    return f"{number(value / size)} {unit}"


def duration(seconds: float) -> str:
    """345 ms, 1.20 s."""
    return scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def size(count: float) -> str:
    """Bytes: 1.50 MiB."""
    return scaled(count, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))


def rate(value: float, unit: str) -> str:
    """Billions a second: GFLOP/s or GB/s."""
    return f"{number(value / 1e9)} G{unit}"


def length(value: int) -> str:
    """8192 as 8k, 8191 as 8191."""
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)


# --- in sentences ---------------------------------------------------------------------------------------------------


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 head, 1,024 heads."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def named_values(values: Iterable[tuple[str, float]]) -> str:
    """accuracy 0.8023, loss 0.4512."""
    return ", ".join(f"{name} {value:.4f}" for name, value in values)


def joined(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
