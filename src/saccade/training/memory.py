"""Too little memory for a step: what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .settings import Settings

_ON_CPU = ("can't allocate memory", "not enough memory")


class TooLittleMemory(ValueError):
    """A step does not fit in memory; it was not made. The message says which options make it smaller."""


@contextlib.contextmanager
def memory_told(step: int, settings: Settings, processes: int = 1) -> Iterator[None]:
    """What comes of too little memory becomes `TooLittleMemory`.

    Args:
        step: counted from 1.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise TooLittleMemory(
            f"training: step {step} needs more memory than there is; {_advice(settings, processes)}"
        ) from None


def _is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or any(words in str(error) for words in _ON_CPU)


def _advice(settings: Settings, processes: int) -> str:
    """Parts of half the size, of the same step; where parts are of one item already, smaller models."""
    parts, most = settings.execution.accumulate, settings.batch // processes
    if parts < most:
        wanted = min(2 * parts, most)
        return (
            f"give --batch {settings.batch} --accumulate {wanted}, the same step in parts of "
            f"{-(-most // wanted)}; if that is too much as well, a larger --accumulate or --checkpointing"
        )
    return "its parts are of one item already; give --checkpointing, shorter items or a smaller model"
