"""Python values as JSON, and JSON from other sources."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ._numbers import rounded

_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # of a character that UTF-16 writes in two


class NotJson(ValueError):
    """A text is not JSON, or its values cannot be used."""


def parsed_json(text: str | bytes) -> Any:
    """The value of a JSON text of any origin. NotJson, also for values nested too deeply and for half a character."""
    try:
        value = json.loads(text)
        if isinstance(text, str) and _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotJson("half of a surrogate pair, which stands for no character") from None
    except RecursionError:
        raise NotJson("its values are nested too deeply") from None
    except ValueError as error:
        raise NotJson(str(error)) from None
    return value


def none(value: float) -> None:
    """JSON's null, for values that are no numbers in JSON."""


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
