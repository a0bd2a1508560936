"""The simple forecasts: the last value repeated, and a linear map of the past by ridge regression in closed form.

    y = W x + b,    W, b = argmin mean |y - W x - b|^2 + strength |W|^2

Shape legend: N windows, S steps of the past, F steps of the forecast, C series.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence

import numpy as np

from ._table import Windows

STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_AT_ONCE = 4096  # windows of a series that are in memory

Map = tuple[np.ndarray, np.ndarray]
"""W (S, F) and b (F,)."""


def repeated(values: np.ndarray, windows: Windows) -> list[np.ndarray]:
    """The last value of each series for all steps, (F, C) for each window."""
    shape = (windows.horizon, values.shape[1])
    return [np.broadcast_to(values[window.now - 1], shape) for window in windows]


def linear(
    training: tuple[np.ndarray, Windows], validation: tuple[np.ndarray, Windows], tested: tuple[np.ndarray, Windows]
) -> tuple[list[np.ndarray], str]:
    """Forecasts (F, C) of the windows tested, by the linear map that is best on the validation windows.

    The map is one for all series or one for each, with a strength of `STRENGTHS`; both are chosen by the squared error
    on the validation windows, the first of equally good ones.

    Args:
        training, validation, tested: scaled values (T, C) of a table, and windows of it.

    Returns:
        The forecasts, and which map it is.
    """
    known, judged = ([_moments(part, series) for series in range(part[0].shape[1])] for part in (training, validation))
    choices = []
    for shared in (True, False):
        for strength in STRENGTHS:
            maps = _maps(known, strength, shared=shared)
            error = sum(moments.error(found) for moments, found in zip(judged, maps, strict=True))
            choices.append((error, shared, strength, maps))
    _, shared, strength, maps = min(choices, key=lambda choice: choice[0])
    forecasts = np.stack([_forecast(tested, series, found) for series, found in enumerate(maps)], axis=-1)
    return list(forecasts), f"{'one map for all series' if shared else 'a map for each series'}, ridge {strength:g}"


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Sums over windows of a series with past x and future y, from which a map and its error are computed.

    Args:
        x, y, xx, xy: sums of x (S,), y (F,), x x^T (S, S), x y^T (S, F).
        yy: the sum of |y|^2.
    """

    count: int
    x: np.ndarray
    y: np.ndarray
    xx: np.ndarray
    xy: np.ndarray
    yy: float

    def __add__(self, other: _Moments) -> _Moments:
        fields = (field.name for field in dataclasses.fields(self))
        return _Moments(*(getattr(self, name) + getattr(other, name) for name in fields))

    def fitted(self, strength: float) -> Map:
        """The map with the least error; the penalty |W| leaves out b."""
        x, y = self.x / self.count, self.y / self.count
        variance = self.xx / self.count - np.outer(x, x) + strength * np.eye(len(x))
        weights = np.linalg.solve(variance, self.xy / self.count - np.outer(x, y))
        return weights, y - x @ weights

    def error(self, token_map: Map) -> float:
        """The mean of |y - W x - b|^2."""
        weights, bias = token_map
        squared = self.yy - 2 * np.sum(weights * self.xy) + np.sum(weights * (self.xx @ weights))
        crossed = 2 * bias @ (weights.T @ self.x - self.y)
        return float((squared + crossed) / self.count + bias @ bias)


def _moments(part: tuple[np.ndarray, Windows], series: int) -> _Moments:
    made = []
    for x, y in _pieces(*part, series):
        made.append(_Moments(len(x), x.sum(0), y.sum(0), x.T @ x, x.T @ y, float(np.sum(y * y))))
    return functools.reduce(operator.add, made)


def _maps(known: Sequence[_Moments], strength: float, *, shared: bool) -> list[Map]:
    """The map of each series."""
    if shared:
        return [functools.reduce(operator.add, known).fitted(strength)] * len(known)
    return [moments.fitted(strength) for moments in known]


def _forecast(tested: tuple[np.ndarray, Windows], series: int, token_map: Map) -> np.ndarray:
    """(N, F), float32 as a model's forecasts are."""
    weights, bias = token_map
    return np.concatenate([(x @ weights + bias).astype(np.float32) for x, _ in _pieces(*tested, series)])


def _pieces(values: np.ndarray, windows: Windows, series: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Past (n, S) and future (n, F) of windows, some at a time."""
    rows = np.lib.stride_tricks.sliding_window_view(values[:, series], windows.past + windows.horizon)
    for first in range(0, len(windows), _AT_ONCE):
        starts = windows.starts[first : first + _AT_ONCE]
        piece = rows[starts.start : starts.stop : starts.step]
        yield np.ascontiguousarray(piece[:, : windows.past]), np.ascontiguousarray(piece[:, windows.past :])
