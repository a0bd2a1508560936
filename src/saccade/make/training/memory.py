"""Too little memory for a step or a look: what to do about it."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator

import torch

from .settings import Settings

_ON_CPU = ("can't allocate memory", "not enough memory")
LOOK_SMALLER = "give a larger --accumulate, shorter items or a smaller model"
INPUT_SMALLER = "give shorter or smaller inputs, or a device with more memory"
OPTIMIZER_SMALLER = "it keeps two numbers for each weight that learns; let fewer weights learn, or give a smaller model"
_SMALLER = "give --checkpointing, shorter items or a smaller model"


class TooLittleMemory(ValueError):
    """Something does not fit in memory, and the step was not made. The message says what to make smaller.

    Example:
        >>> import saccade
        >>> issubclass(saccade.training.TooLittleMemory, ValueError)  # as other wrong input
        True
    """


@contextlib.contextmanager
def memory_told(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """What comes of too little memory becomes `TooLittleMemory`.

    Args:
        what: needs it, for the message.
        advice: asked when nothing of what did not fit is held any more.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what was computed until then
        raise TooLittleMemory(f"{what} needs more memory than is available; {advice()}") from None


def is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _ON_CPU)


def smaller_parts(settings: Settings, processes: int, fits: Callable[[int], bool] | None) -> str:
    """The same step in the largest parts that fit, each time of half the size; where none do, smaller models.

    Args:
        fits: tries so many micro-batches of the step; None where that cannot be tried.
    """
    parts, most = settings.execution.accumulate, settings.batch // processes
    if parts >= most:
        return f"its parts are of one item already; {_SMALLER}"
    while parts < most:
        parts = min(2 * parts, most)
        if fits is None or fits(parts):
            told = "; if that is too much as well, a larger --accumulate" if fits is None else ", which fit"
            size = -(-most // parts)
            return f"give --batch {settings.batch} --accumulate {parts}, the same step in parts of {size}{told}"
    return f"parts of one item do not fit either; {_SMALLER}"
