"""Paths, articles and number ranges for messages, and evidence as plain values."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...support._numbers import joined
from ._finding import Location


def shown_path(path: str) -> str:
    """The path relative to the working folder if it is inside, otherwise unchanged."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        return path
    return path if relative.startswith("..") else relative


def article(noun: str) -> str:
    """The indefinite article for a noun, which may be in backquotes."""
    return "an" if noun.lstrip("`")[:1].lower() in tuple("aeiou") else "a"


def plain(value: Any) -> Any:
    """`value` as JSON has it: tensors and arrays as lists, numbers that JSON lacks and all else as words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Location):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


MEMORY_WORDS = ("can't allocate memory", "cannot allocate memory", "memoryerror", "out of memory", "bad_alloc")
GPU_WORDS = (
    "not compiled with cuda",
    "no cuda gpus",
    "no nvidia driver",
    "cuda is not available",
    "cuda driver",
    "cuda error",
    "not linked with support for mps",
    "mps backend is supported",
    "no hip gpus",
    "not compiled with xpu",
)


# A causal mask, True = attend, for fixes: of L positions, on the device of the scores.
TRIANGLE = "torch.ones(L, L, dtype=torch.bool, device=scores.device).tril()"


def spans(numbers: Sequence[int]) -> str:
    """In words: "4 to 9 and 12"; only the first few if there are many."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    if len(words) > 4:
        return f"{', '.join(words[:3])} and others"
    return joined(words)
