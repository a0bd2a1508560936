"""The compiled module, as far as the benchmark needs it: the instruction set and the machine's limits.

Everything that touches `saccade._native` from the benchmark stands here.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

from torch import Tensor

READING_SECONDS = 0.005


def compiled() -> Any | None:
    """The module `saccade._native`, or None where there is no build that loads."""
    try:
        return importlib.import_module("saccade._native")
    except ImportError:
        return None


def in_use() -> str | None:
    """The instruction set that runs."""
    native = compiled()
    return None if native is None else str(native.active())


def peak(dtype: str, threads: int, milliseconds: float) -> Callable[[], float] | None:
    """A meter of the FLOP/s of nothing but multiply-adds; None where there is no build or no such instruction."""
    native = compiled()
    measure = None if native is None else getattr(native, "peak_bf16" if dtype == "bfloat16" else "peak_f32", None)
    if measure is None or measure(threads, 1.0) is None:
        return None
    return lambda: float(measure(threads, milliseconds))


def reading(tensors: tuple[Tensor, ...], threads: int) -> Callable[[], float] | None:
    """A meter of the bytes/s at which the tensors' memory can be read; None where there is no build, and for so few
    bytes that their reading cannot be timed."""
    native = compiled()
    measure = getattr(native, "read_bandwidth", None)
    if measure is None or any(
        not measure(tensor.data_ptr(), tensor.numel() * tensor.element_size(), threads) for tensor in tensors
    ):
        return None
    # The tensors are held by the meter: their addresses stay theirs.
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]

    def rate() -> float:
        """Once, or again for `READING_SECONDS`: what fits a cache is there from the second time on, as in a
        contender's repeated calls."""
        seconds: list[float] = []
        while sum(seconds) < READING_SECONDS:
            rates = [measure(one.data_ptr(), size, threads) for one, size in zip(tensors, sizes, strict=True)]
            seconds.append(sum(size / rate for size, rate in zip(sizes, rates, strict=True)))
        return sum(sizes) / statistics.fmean(seconds[1:] or seconds)

    return rate
