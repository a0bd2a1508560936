"""Values as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ._numbers import rounded


def none(value: float) -> None:
    """For what JSON has no number for: null."""


def plain_values(value: Any, not_finite: Callable[[float], Any] = none, *, digits: int | None = None) -> Any:
    """Tensors, arrays, tuples and sets as lists, keys as text, floats with so many significant digits.

    Args:
        value: what is to be written; text, and what is none of these, stays as it is.
        not_finite: says what stands for NaN and infinities: `none`, `str` or `float`.
        digits: None keeps all.
    """
    if isinstance(value, Mapping):
        return {str(key): plain_values(held, not_finite, digits=digits) for key, held in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_values(held, not_finite, digits=digits) for held in value]
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return plain_values(value.tolist(), not_finite, digits=digits)
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return not_finite(value)
    return value if digits is None else rounded(value, digits)
