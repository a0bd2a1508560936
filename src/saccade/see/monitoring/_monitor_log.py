"""The log of a training monitor: a small protocol, and TensorBoard."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ...support._extras import installing

BINS = 64


@dataclass(frozen=True)
class Histogram:
    """A histogram: bin m holds counts[m] entries from edges[m] to edges[m + 1].

    Example:
        >>> from saccade.monitoring import Histogram
        >>> both = Histogram.together([(0.0, 1.0), (1.0, 2.0)], [(5,), (3,)])
        >>> both.edges[0], both.edges[-1], sum(both.counts)
        (0.0, 2.0, 8.0)
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def together(cls, edges: Sequence[Sequence[float]], counts: Sequence[Sequence[float]]) -> Histogram:
        """Several histograms as one with bins of equal width; entries count as evenly spread over their old bins."""
        both = [(np.asarray(e), np.asarray(c, np.float64)) for e, c in zip(edges, counts, strict=True)]
        both = [(e, c) for e, c in both if c.sum() > 0]
        if not both:
            return cls((0.0, 0.0), (0.0,))
        low, high = min(e[0] for e, _ in both), max(e[-1] for e, _ in both)
        if low == high:
            return cls((float(low), float(high)), (float(sum(c.sum() for _, c in both)),))
        wide = np.linspace(low, high, BINS + 1)
        below = sum(_counts_below(wide, e, c) for e, c in both)
        return cls(tuple(wide.tolist()), tuple(np.diff(below).tolist()))


def _counts_below(at: np.ndarray, edges: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The number of entries below each of `at`."""
    if edges[0] == edges[-1]:  # all entries are the same number, in the bin that begins with it
        return np.where((at > edges[0]) | (at == at[-1]), counts.sum(), 0.0)
    return np.interp(at, edges, np.concatenate([[0.0], np.cumsum(counts)]))


@runtime_checkable
class MonitorLog(Protocol):
    """A log for a monitor. In each watched step `scalars` is called last, and always.

    Example:
        >>> import saccade
        >>> class PrintedLog:
        ...     def scalars(self, values, step):
        ...         print(step, len(values))
        ...     def histograms(self, values, step): ...
        ...     def text(self, tag, text, step): ...
        >>> isinstance(PrintedLog(), saccade.monitoring.MonitorLog)
        True
    """

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None: ...


class TensorBoardLog:
    """Writes to a `SummaryWriter`, or to anything with its `add_scalar`, `add_histogram_raw` and `add_text`.

    Methods that the writer does not have are not called.

    Example:
        >>> from saccade.monitoring import TensorBoardLog
        >>> class PrintedWriter:
        ...     def add_scalar(self, tag, value, step):
        ...         print(tag, value, step)
        >>> TensorBoardLog(PrintedWriter()).scalars({"attention/00/entropy": 1.5}, step=50)
        attention/00/entropy 1.5 50
    """

    def __init__(self, writer: Any):
        self._writer = writer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        if hasattr(self._writer, "flush"):
            self._writer.flush()

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        if not hasattr(self._writer, "add_histogram_raw"):
            return
        for tag, held in values.items():
            counts = np.asarray(held.counts)
            centres = (np.asarray(held.edges[1:]) + np.asarray(held.edges[:-1])) / 2
            self._writer.add_histogram_raw(
                tag,
                min=held.edges[0],
                max=held.edges[-1],
                num=float(counts.sum()),
                sum=float(counts @ centres),
                sum_squares=float(counts @ centres**2),
                bucket_limits=list(held.edges[1:]),
                bucket_counts=list(held.counts),
                global_step=step,
            )

    def text(self, tag: str, text: str, step: int) -> None:
        if hasattr(self._writer, "add_text"):
            self._writer.add_text(tag, text, step)


class NullLog:
    """Discards everything."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None: ...


def tensorboard_in(folder: str | os.PathLike[str] | None, first_step: int | None = None) -> TensorBoardLog:
    """A new TensorBoard log in `folder`; None is TensorBoard's own choice, a new folder in `runs`.

    Args:
        first_step: older files in the folder are hidden from this step on.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ModuleNotFoundError(f"tensorboard: is not installed ({installing('train')}); log=False needs none")
    from torch.utils.tensorboard import SummaryWriter

    log_dir = None if folder is None else str(Path(folder))
    return TensorBoardLog(SummaryWriter(log_dir, purge_step=first_step))


def as_log(given: Any) -> MonitorLog:
    """The log for a value of `AttentionMonitor`'s argument.

    Raises:
        TypeError: an unsuitable value.
    """
    if given is False:
        return NullLog()
    if given is None or isinstance(given, str | os.PathLike):
        return tensorboard_in(given)
    if isinstance(given, MonitorLog):
        return given
    if hasattr(given, "add_scalar"):
        return TensorBoardLog(given)
    raise TypeError(
        "log: expected a folder, a SummaryWriter, an object with scalars(), histograms() and text(), or False, "
        f"got {type(given).__name__}"
    )
