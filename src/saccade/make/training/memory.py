"""Errors for steps and evaluations that do not fit in memory, with advice."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

import torch

from .settings import Settings

_ON_CPU = ("can't allocate memory", "not enough memory")
LOOK_SMALLER = "give a larger --accumulate, shorter items or a smaller model"
INPUT_SMALLER = "give shorter or smaller inputs, or a device with more memory"
OPTIMIZER_SMALLER = "AdamW keeps two numbers for each trained weight; train fewer weights, or give a smaller model"
_SMALLER = "give --checkpointing, shorter items or a smaller model"


class TooLittleMemory(ValueError):
    """A step or an evaluation does not fit in memory. The message says which sizes to reduce.

    Example:
        >>> import saccade
        >>> issubclass(saccade.training.TooLittleMemory, ValueError)  # as other wrong input
        True
    """


@contextlib.contextmanager
def memory_told(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """Raises `TooLittleMemory` in place of PyTorch's error.

    Args:
        what: needs the memory, for the message.
        advice: called after the memory of the failed computation was freed.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # frames keep tensors alive
        raise TooLittleMemory(f"{what} needs more memory than is available; {advice()}") from None


def is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _ON_CPU)


def smaller_parts(settings: Settings, processes: int, fits: Callable[[int], bool] | None) -> str:
    """Advice for a step that does not fit: the number of micro-batches to use, or a smaller model.

    Args:
        fits: whether the step can be computed in so many micro-batches; None if that cannot be tried.
    """
    parts, most = settings.execution.accumulate, settings.batch // processes
    if parts >= most:
        return f"its parts are of one item already; {_SMALLER}"
    while parts < most:
        parts = min(2 * parts, most)
        if fits is None or fits(parts):
            addition = "; if that is too much as well, a larger --accumulate" if fits is None else ", which fit"
            size = -(-most // parts)
            return f"give --batch {settings.batch} --accumulate {parts}, the same step in parts of {size}{addition}"
    return f"parts of one item do not fit either; {_SMALLER}"
