"""A sentence of advice that follows from the measured numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...support import _numbers
from .results import READING, ApproximationError, ContenderResults, VariantComparison
from .trends import crossover, sound

FASTER = 1.2  # times as fast; less is not worth a change
CALL = "training"


@dataclass(frozen=True)
class Recommendation:
    """A conclusion from the numbers.

    length: the longest with a time of exact attention. error_length: the longest with known errors. close: the fastest
    mechanism that is worth a change and close to exact attention. fastest: the fastest mechanism, regardless of its
    error; None if none is worth a change.
    """

    length: int
    error_length: int | None
    exact: ContenderResults
    close: ContenderResults | None
    fastest: ContenderResults | None

    def faster(self, line: ContenderResults) -> float:
        """Speed relative to exact attention, at this length."""
        return _seconds(self.exact, self.length) / _seconds(line, self.length)

    def named(self) -> list[ContenderResults]:
        """The results named in the advice, without duplicates."""
        lines = (self.exact, self.close, self.fastest)
        return list({line.name: line for line in lines if line is not None}.values())

    def error(self, line: ContenderResults) -> ApproximationError | None:
        point = None if self.error_length is None else line.at(self.error_length)
        return None if point is None else point.error


def choose(comparison: VariantComparison, tolerance: float) -> Recommendation | None:
    """The fastest mechanism with an error of at most `tolerance`, and the fastest with any error; None if exact
    attention was not timed."""
    exact = comparison.exact(READING)
    lengths = [] if exact is None else exact.amounts(CALL)[0]
    if exact is None or not lengths:
        return None
    known = [p.length for line in comparison.of(READING) for p in line.points if p.error is not None]
    choice = Recommendation(lengths[-1], max(known, default=None), exact, None, None)
    others = [line for line in comparison.of(READING) if not line.whole and _timed(line, choice.length)]
    worth = sorted((line for line in others if choice.faster(line) >= FASTER), key=lambda line: -choice.faster(line))
    close = [line for line in worth if (error := choice.error(line)) is not None and error.whole <= tolerance]
    return Recommendation(
        choice.length, choice.error_length, exact, *(next(iter(some), None) for some in (close, worth))
    )


def advice(comparison: VariantComparison, tolerance: float | None = None) -> str:
    """A sentence of advice, and a second one if times are noisy.

    tolerance: the largest relative error of an approximation that may replace exact attention; None uses the
    comparison's settings.
    """
    tolerance = comparison.settings.get("tolerance", 0.1) if tolerance is None else tolerance
    choice = choose(comparison, tolerance)
    if choice is None:
        return "No advice: exact attention was not timed, so there is no baseline to compare with."
    unsound = [line.name for line in choice.named() if not sound(line, CALL)]
    if unsound:
        return (
            f"No advice: the times of {_numbers.joined(unsound)} are not plausible: they fall with length or follow no "
            "power law. Another program may have used the machine; measure again when it is idle."
        )
    return _advised(choice, comparison) + _caveat(choice)


def _caveat(choice: Recommendation) -> str:
    noisy = [line.name for line in choice.named() if any(point.noisy for point in line.points)]
    if not noisy:
        return ""
    return f" The times of {_numbers.joined(noisy)} are noisy: measure again when the machine is idle."


def _advised(choice: Recommendation, comparison: VariantComparison) -> str:
    at = f"{_numbers.length(choice.length)} tokens"
    if choice.fastest is None:
        return (
            f"Stay with exact attention: up to {at} no mechanism on the same q, k and v trains {FASTER:g} times as "
            "fast."
        )
    fastest = f"{choice.fastest.name}, {choice.faster(choice.fastest):.1f} times as fast at {at}"
    if choice.close is None:
        closest = _closest(choice, comparison)
        return (
            f"Stay with exact attention for these q, k and v: no faster mechanism is close to it{closest}"
            f"; for a model that is trained with it, the fastest is {fastest}{_off(choice, choice.fastest)}."
        )
    close = (
        f"Use {choice.close.name}{_since(choice)}: at {at} it trains {choice.faster(choice.close):.1f} times as fast "
        f"as exact attention{_off(choice, choice.close)}"
    )
    if choice.fastest.name == choice.close.name:
        return f"{close}; no mechanism is faster."
    return f"{close}; for a model that is trained with it, the fastest is {fastest}{_off(choice, choice.fastest)}."


def _since(choice: Recommendation) -> str:
    assert choice.close is not None
    crossing = crossover(choice.close, choice.exact, CALL)
    return f" from about {about(crossing.length)} tokens on" if crossing.kind == "measured" and crossing.length else ""


def _off(choice: Recommendation, line: ContenderResults) -> str:
    error = choice.error(line)
    if error is None or choice.error_length is None:
        return ", with an unknown error"
    both = f"{_numbers.percent(error.whole)} over all rows and {_numbers.percent(error.worst)} in the worst"
    return f", with an error of {both}, at {_numbers.length(choice.error_length)}"


def _closest(choice: Recommendation, comparison: VariantComparison) -> str:
    """The smallest error of mechanisms that are worth a change."""
    others = [line for line in comparison.of(READING) if not line.whole and _timed(line, choice.length)]
    errors = [error.whole for line in others if choice.faster(line) >= FASTER and (error := choice.error(line))]
    return f" (an error of {_numbers.percent(min(errors))} or more)" if errors else ""


def about(length: float) -> str:
    """Round to two significant digits: 1,234 becomes 1,200."""
    return f"{float(f'{length:.2g}'):,.0f}"


def _timed(line: ContenderResults, length: int) -> bool:
    return bool(_seconds(line, length))


def _seconds(line: ContenderResults, length: int) -> Any:
    point = line.at(length)
    return None if point is None else point.seconds(CALL)
