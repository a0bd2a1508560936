"""What chance gives: a head that looks at all it may see alike, and heads whose logits are random numbers.

Random logits are normal with the spread of an untrained model: weights drawn by fan-in give 1.0 in a row, its most
uneven heads up to 1.25. A weight p of such a head has the log odds z - log sum exp(others), normal as well in good
approximation (Fenton 1960 for the sum), so how large the largest of many gets is a quantile. Rows that look at one key
have a part of their luck in common: their queries are made of one past. In the deepest layers that is up to .4 of a
variance that is lower there, .75: .3, a sixth of the variance assumed here, which is 1.6 and that of the sum.

Shape legend: H heads, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...operator._call import ObservedCall
from ...operator._masks import FromTensor, Mask, as_mask
from ...operator._statistics import Statistics

SPREAD = 1.25  # of random logits in a row
SHARED = 0.2  # of the variance of a weight on one key, by all rows of a head
LUCK = 0.01  # so often random heads may tell anything of one kind
CLEAR_OF = 0.3  # so far above a head that looks everywhere alike a weight must stand, 1 for always
_LEAST = 1e-12  # below it a weight is as good as none


def shown(call: ObservedCall) -> Mask | None:
    """Which pairs may attend: the mask, and where a dense bias is not -inf or a dtype's lowest number."""
    mask, bias = as_mask(call.mask), call.bias
    if not isinstance(bias, Tensor):
        return mask
    open_ = bias > torch.finfo(bias.dtype).min / 2
    if bool(open_.all()):
        return mask
    return FromTensor(open_) if mask is None else mask & FromTensor(open_)


def even_call(call: ObservedCall, mask: Mask | None) -> ObservedCall:
    """The call of a head that looks at all that ``mask`` shows alike; one head unless the mask differs by head."""
    heads = 1 if mask is None else mask._batch_and_heads()[1]
    nothing = torch.zeros(1, heads, call.query.shape[2], 1, device=call.query.device)
    return ObservedCall(nothing, nothing, nothing, mask, scale=1.0, out=nothing, source="chance")


class UniformCalls:
    """The even call of each layer; layers that show the same pairs share it."""

    def __init__(self) -> None:
        self._known: list[tuple[Mask | None, ObservedCall]] = []

    def of(self, call: ObservedCall) -> ObservedCall:
        mask = shown(call)
        for known, even in self._known:
            if known is mask or (known is not None and known == mask):
                return even
        self._known.append((mask, even_call(call, mask)))
        return self._known[-1][1]


class UniformStatistics:
    """The even call of each layer and its statistics, which `measure` takes; the layers of one even call share them."""

    def __init__(self, measure: Callable[[ObservedCall], Statistics]):
        self._measure, self._calls = measure, UniformCalls()
        self._known: dict[int, Statistics] = {}

    def of(self, call: ObservedCall) -> tuple[ObservedCall, Statistics]:
        even = self._calls.of(call)  # which keeps it, so its id stays its own
        if id(even) not in self._known:
            self._known[id(even)] = self._measure(even)
        return even, self._known[id(even)]


def above_chance(score: np.ndarray, chance: np.ndarray | float) -> np.ndarray:
    """(score - chance) / (1 - chance), at least 0: 0 for chance and 1 for always."""
    return np.asarray(np.maximum(0.0, (score - chance) / np.maximum(1 - chance, _LEAST)))


# Random logits


def largest_weight(chance: np.ndarray, count: int) -> np.ndarray:
    """What the largest of ``count`` weights of random heads stays under but for LUCK, each of this ``chance``."""
    odds = _odds(chance)
    others = _sum_of_others(odds)
    middle = np.log(odds) - SPREAD**2 / 2 + others / 2
    return np.asarray(1 / (1 + np.exp(-middle - _quantile(count) * np.sqrt(SPREAD**2 + others))))


class ChanceMean(NamedTuple):
    """What chance gives to an average over rows: its value and its standard deviation, where each row has luck of its
    own, and where all have the same."""

    value: np.ndarray
    deviation: np.ndarray
    common: np.ndarray


def mean_of(chance: np.ndarray, different: float = 1.0) -> ChanceMean:
    """Of the chances (..., rows) of the single rows; NaN without a row.

    ``different``: the share of rows that are of different words. Queries of one word are alike, and so is their luck.
    """
    rows = chance.shape[-1]
    if not rows:
        return ChanceMean(*3 * (np.full(chance.shape[:-1], np.nan),))
    spread = SPREAD**2 + _sum_of_others(_odds(chance))
    variance = chance * (1 - chance) * (1 - 1 / np.sqrt(1 + math.pi * spread / 8))  # of a logistic of a normal number
    return ChanceMean(chance.mean(-1), np.sqrt(variance.sum(-1) / different) / rows, np.sqrt(variance).mean(-1))


def averaged(chance: ChanceMean, rows: np.ndarray | int, heads: int = 1) -> ChanceMean:
    """What chance gives to the average of so many rows like this ``chance``, in so many heads."""
    return ChanceMean(chance.value, chance.deviation / np.sqrt(rows * heads), chance.deviation / np.sqrt(heads))


def largest_mean(chance: ChanceMean, count: int, clear_of: float = CLEAR_OF, shared: float = 0.0) -> np.ndarray:
    """What the largest of ``count`` such averages stays under but for LUCK, and what is clear of looking alike.

    ``shared``: the share of luck that is that of all rows, `SHARED` where they look at one key.
    """
    deviation = np.sqrt((1 - shared) * chance.deviation**2 + shared * np.maximum(chance.deviation, chance.common) ** 2)
    lucky = chance.value + _quantile(count) * deviation
    return np.asarray(np.maximum(lucky, chance.value + clear_of * (1 - chance.value)))


def uneven(weights: np.ndarray, attended: np.ndarray, count: int, different: float = 1.0) -> np.ndarray:
    """(..., H): whether the logits of a head spread more than random ones would in ``count`` heads.

    ``weights`` (..., H, rows, keys), ``attended`` the same with H = 1: the keys that a row sees. ``different``: as in
    `mean_of`, of the rows and of the keys.
    """
    logits = np.log(np.maximum(weights, _LEAST, dtype=np.float64))
    keys = attended.sum(-1, keepdims=True)
    middle = np.where(attended, logits, 0).sum(-1, keepdims=True) / np.maximum(keys, 1)
    squares = np.where(attended, (logits - middle) ** 2, 0).sum((-1, -2))
    freedom = np.maximum(keys - 1, 0).sum((-1, -2))
    # Wilson and Hilferty 1931: the cube root of a chi-square is normal
    part = 2 / (9 * np.maximum(freedom * different**2, 1))
    most = SPREAD**2 * freedom * (1 - part + _quantile(count) * np.sqrt(part)) ** 3
    return np.asarray((squares > most) & (freedom > 0))


def _odds(chance: np.ndarray) -> np.ndarray:
    inside = np.clip(np.asarray(chance, np.float64), _LEAST, 1 - _LEAST)
    return np.asarray(inside / (1 - inside))


def _sum_of_others(odds: np.ndarray) -> np.ndarray:
    """The variance of the log of the sum over the other keys, of which there are 1 / odds for each one looked at."""
    return np.asarray(np.log1p((math.exp(SPREAD**2) - 1) * odds))


def _quantile(count: int) -> float:
    return -NormalDist().inv_cdf(LUCK / max(count, 1))
