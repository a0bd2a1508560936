"""The values that a search tries for an option: a range, or a list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DIGITS = 3  # of a number that is tried: what is printed is what was used


@dataclasses.dataclass(frozen=True)
class Between:
    """A range of numbers to search.

    Args:
        low, high: the ends, both included.
        step: between neighbouring values; None allows any number.
        logarithmic: draw evenly by factors, not by differences.

    Example:
        >>> import saccade
        >>> saccade.tasks.Between(1e-5, 1e-1, logarithmic=True).rounded(0.00123456)
        0.00123
    """

    low: float
    high: float
    step: float | None = None
    logarithmic: bool = False

    def rounded(self, value: float) -> float:
        """The nearest number with few digits."""
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A few values to search.

    Args:
        values: each of them can be tried.

    Example:
        >>> import saccade
        >>> saccade.tasks.OneOf((1, 2, 4)).values
        (1, 2, 4)
    """

    values: tuple[Any, ...]


Space = Mapping[str, Between | OneOf]
"""The values to try, by option."""


def rates(usual: float) -> Between:
    """Learning rates from a tenth to ten times the usual one."""
    return Between(usual / 10, 10 * usual, logarithmic=True)


def dropouts(usual: float) -> Between:
    return Between(0.0, 0.5 if usual <= 0.5 else 0.8, step=0.05)


def doubled(usual: int) -> OneOf:
    """Half of a number, itself and twice as much."""
    return OneOf(tuple(dict.fromkeys((max(usual // 2, 1), usual, 2 * usual))))


def described(space: Space) -> dict[str, Any]:
    """The space as plain values."""
    return {name: dataclasses.asdict(choice) for name, choice in space.items()}


def fitting(name: str, choice: Between | OneOf, examples: int) -> Between | OneOf:
    """The values to try with `count` examples: no batch is larger."""
    if name != "batch" or not isinstance(choice, OneOf):
        return choice
    return OneOf(tuple(dict.fromkeys(min(value, examples) for value in choice.values)))


def is_choice(choice: Between | OneOf) -> bool:
    """Whether there is more than one value to try."""
    return not isinstance(choice, OneOf) or len(choice.values) > 1
