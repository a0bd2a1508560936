"""The benchmark's interface to the compiled module: instruction set and limits of the machine.

Only this file of the benchmark uses `saccade._native`.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from typing import Any

from torch import Tensor

READING_SECONDS = 0.005


def compiled() -> Any | None:
    """The module `saccade._native`, or None if it cannot be loaded."""
    try:
        return importlib.import_module("saccade._native")
    except ImportError:
        return None


def in_use() -> str | None:
    """The instruction set that runs."""
    native = compiled()
    return None if native is None else str(native.active())


def peak(dtype: str, threads: int, milliseconds: float) -> Callable[[], float] | None:
    """A function that measures FLOP/s of multiply-adds alone; None without native kernels or such an instruction."""
    native = compiled()
    measure = None if native is None else getattr(native, "peak_bf16" if dtype == "bfloat16" else "peak_f32", None)
    if measure is None or measure(threads, 1.0) is None:
        return None
    return lambda: float(measure(threads, milliseconds))


def reading(tensors: tuple[Tensor, ...], threads: int) -> Callable[[], float] | None:
    """A meter of the bytes/s of reading the tensors' memory; None without native kernels, or if there are too few bytes
    for a timing."""
    native = compiled()
    measure = getattr(native, "read_bandwidth", None)
    if measure is None or any(
        not measure(tensor.data_ptr(), tensor.numel() * tensor.element_size(), threads) for tensor in tensors
    ):
        return None
    # Keeps the tensors alive, whose addresses it uses.
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]

    def rate() -> float:
        """Read once, or repeatedly for `READING_SECONDS`: like a contender's repeated calls, later passes may hit the
        cache."""
        seconds: list[float] = []
        while sum(seconds) < READING_SECONDS:
            rates = [measure(tensor.data_ptr(), size, threads) for tensor, size in zip(tensors, sizes, strict=True)]
            seconds.append(sum(size / rate for size, rate in zip(sizes, rates, strict=True)))
        return sum(sizes) / statistics.fmean(seconds[1:] or seconds)

    return rate
