"""Scores by chance: of a head with equal weights on all visible keys, and of heads with random logits.

Random logits are normal with the spread of an untrained model: weights drawn by fan-in give a standard deviation of 1.0
in a row, and up to 1.25 in the most uneven heads. A weight p of such a head has the log odds z - log sum exp(others),
approximately normal as well (Fenton 1960 for the sum), so the size of the largest of many weights is a quantile. Rows
that look at one key share part of their deviation, since their queries come from the same past. In the deepest layers
up to .4 of a variance of .75 is shared: .3, a sixth of the variance assumed here, 1.6 plus that of the sum.

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
SHARED = 0.2  # share of the variance of a weight on one key that is common to all rows of a head
LUCK = 0.01  # probability that random heads give a finding of one kind
CLEAR_OF = 0.3  # least distance above equal weights for a finding, on a scale with 1 for a weight of 1
_LEAST = 1e-12  # smaller weights count as 0


def shown(call: ObservedCall) -> Mask | None:
    """The visible pairs: the mask, and where a dense bias is neither -inf nor a dtype's lowest number."""
    mask, bias = as_mask(call.mask), call.bias
    if not isinstance(bias, Tensor):
        return mask
    open_ = bias > torch.finfo(bias.dtype).min / 2
    if bool(open_.all()):
        return mask
    return FromTensor(open_) if mask is None else mask & FromTensor(open_)


def even_call(call: ObservedCall, mask: Mask | None) -> ObservedCall:
    """The call of a head with equal weights on everything in ``mask``; one head unless the mask differs by head."""
    batch, heads = (1, 1) if mask is None else mask._batch_and_heads()
    nothing = torch.zeros(batch, heads, call.query.shape[2], 1, device=call.query.device)
    return ObservedCall(nothing, nothing, nothing, mask, scale=1.0, out=nothing, source="chance")


class UniformCalls:
    """The call with equal weights for each layer; layers with the same visible pairs share it."""

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
    """The equal-weight call of each layer and its statistics by `measure`; layers with one such call share both."""

    def __init__(self, measure: Callable[[ObservedCall], Statistics]):
        self._measure, self._calls = measure, UniformCalls()
        self._known: dict[int, Statistics] = {}

    def of(self, call: ObservedCall) -> tuple[ObservedCall, Statistics]:
        even = self._calls.of(call)  # which keeps the call, so its id is not reused
        if id(even) not in self._known:
            self._known[id(even)] = self._measure(even)
        return even, self._known[id(even)]


def above_chance(score: np.ndarray, chance: np.ndarray | float) -> np.ndarray:
    """(score - chance) / (1 - chance), at least 0: 0 for chance and 1 for always."""
    return np.asarray(np.maximum(0.0, (score - chance) / np.maximum(1 - chance, _LEAST)))


# Random logits


def largest_weight(chance: np.ndarray, count: int) -> np.ndarray:
    """The bound that the largest of ``count`` weights of random heads exceeds with probability LUCK; (...) chances."""
    odds = _odds(chance)
    others = _sum_of_others(odds)
    middle = np.log(odds) - SPREAD**2 / 2 + others / 2
    return np.asarray(1 / (1 + np.exp(-middle - _quantile(count) * np.sqrt(SPREAD**2 + others))))


class ChanceMean(NamedTuple):
    """An average over rows by chance: its value, its standard deviation for independent rows, and that for rows with
    one common deviation."""

    value: np.ndarray
    deviation: np.ndarray
    common: np.ndarray


def mean_of(chance: np.ndarray, different: float = 1.0) -> ChanceMean:
    """The mean of the chances (..., rows) of single rows; NaN without a row.

    ``different``: the share of rows with different words. Queries of one word are alike, and so are their deviations.
    """
    rows = chance.shape[-1]
    if not rows:
        return ChanceMean(*3 * (np.full(chance.shape[:-1], np.nan),))
    spread = SPREAD**2 + _sum_of_others(_odds(chance))
    variance = chance * (1 - chance) * (1 - 1 / np.sqrt(1 + math.pi * spread / 8))  # logistic of a normal variable
    return ChanceMean(chance.mean(-1), np.sqrt(variance.sum(-1) / different) / rows, np.sqrt(variance).mean(-1))


def averaged(chance: ChanceMean, rows: np.ndarray | int, heads: int = 1) -> ChanceMean:
    """The average over `rows` rows with this ``chance``, in each of `heads` heads."""
    return ChanceMean(chance.value, chance.deviation / np.sqrt(rows * heads), chance.deviation / np.sqrt(heads))


def largest_mean(chance: ChanceMean, count: int, clear_of: float = CLEAR_OF, shared: float = 0.0) -> np.ndarray:
    """The bound that the largest of ``count`` such averages exceeds with probability LUCK, at least `clear_of` high.

    ``shared``: the share of variance that is common to all rows, `SHARED` where they look at one key.
    """
    deviation = np.sqrt((1 - shared) * chance.deviation**2 + shared * np.maximum(chance.deviation, chance.common) ** 2)
    lucky = chance.value + _quantile(count) * deviation
    return np.asarray(np.maximum(lucky, chance.value + clear_of * (1 - chance.value)))


def uneven(weights: np.ndarray, attended: np.ndarray, count: int, different: float = 1.0) -> np.ndarray:
    """(..., H): whether the logits of a head spread more than random logits would in any of ``count`` heads.

    ``weights`` (..., H, rows, keys); ``attended`` the same with H = 1: the visible keys of each row. ``different``: as
    in `mean_of`, for rows and keys.
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
    """The variance of the log of the sum over the other keys, of which there are about 1 / odds."""
    return np.asarray(np.log1p((math.exp(SPREAD**2) - 1) * odds))


def _quantile(count: int) -> float:
    return -NormalDist().inv_cdf(LUCK / max(count, 1))
