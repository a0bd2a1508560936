"""A head as a few numbers and a small map: from all rows of a short text, from a sample of a long one.

Shape legend: r rows in the sample, Lk keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ._head import HeadPyramid

THUMBNAIL = 48  # bins of a small map, on each side
_ALL = 2**21  # pairs of a head up to which all rows are taken
_ROWS = 2  # rows of each bin otherwise
_TOGETHER = 12  # rows computed at once, as many as the kernels take: all their weights are held
_CELLS = 2**18  # weights that are summed at once
NUMBERS = ("entropy", "evenness", "largest", "distance", "self", "previous", "next", "first", "sink")


@dataclass(frozen=True, eq=False)
class HeadSummary:
    """``sampled``: the number of sampled rows, 0: all. Means over rows that see a key; entropy in nats.

    ``thumbnail`` (48, 48) or smaller: the largest weight of each bin, NaN where nothing is visible.
    """

    call: str
    head: int
    sampled: int
    thumbnail: np.ndarray
    numbers: dict[str, float]
    role: dict[str, Any] | None = None
    alarms: list[str] = field(default_factory=list)


def summary(head: HeadPyramid, role: dict[str, Any] | None, alarms: list[str]) -> HeadSummary:
    """The head's numbers and its small map."""
    rows = _chosen(head.length_q, head.length_k)
    thumbnail = np.full((min(THUMBNAIL, head.length_q), min(THUMBNAIL, head.length_k)), -1.0, np.float32)
    parts: list[dict[str, np.ndarray]] = []
    first = head.first_key()
    for at in range(0, len(rows), _TOGETHER):
        some = rows[at : at + _TOGETHER]
        weights, visible = head.weights_and_visible(some, rough=True)
        step = max(1, _CELLS // head.length_k)
        for start in range(0, len(some), step):
            part = slice(start, start + step)
            parts.append(
                _numbers(weights[part], visible[part], some[part].numpy() + head.call.placed_for(head.item), first)
            )
            _mark(thumbnail, head, weights[part], visible[part], some[part].numpy())
    numbers = {name: _mean(np.concatenate([part[name] for part in parts])) for name in NUMBERS}
    shown = np.where(thumbnail < 0, np.nan, thumbnail).astype(np.float32)
    sampled = 0 if len(rows) == head.length_q else len(rows)
    return HeadSummary(head.call.id, head.head, sampled, shown, numbers, role, alarms)


def _chosen(rows: int, keys: int) -> torch.Tensor:
    """All rows, or some of each bin of the small map."""
    if rows * keys <= _ALL:
        return torch.arange(rows)
    edges = torch.linspace(0, rows, THUMBNAIL * _ROWS + 1)[1:].ceil().long() - 1
    return torch.unique(edges.clamp(0, rows - 1))


def _numbers(weights: np.ndarray, visible: np.ndarray, own: np.ndarray, first: int) -> dict[str, np.ndarray]:
    """One number by name for each row that sees a key; evenness for rows that see two."""
    rows = np.flatnonzero(visible.any(1))
    w, count, own = weights[rows].astype(np.float64), visible[rows].sum(1), own[rows]
    entropy = row_entropy(w)
    share = w.sum(1)
    some = np.where(share > 0, share, 1)
    evenness = (entropy / some + np.log(some)) / np.log(np.maximum(count, 2))
    distance = (w * np.abs(own[:, None] - np.arange(w.shape[1]))).sum(1)
    return {
        "entropy": entropy,
        "evenness": evenness[count > 1].clip(0, 1),
        "largest": w.max(1, initial=0),
        "distance": distance,
        "self": _at(w, own),
        "previous": _at(w, own - 1),
        "next": _at(w, own + 1),
        "first": _at(w, np.full(len(w), first)),
        "sink": (1 - share).clip(0),
    }


def row_entropy(weights: np.ndarray) -> np.ndarray:
    """-sum_j p_ij log p_ij in nats of each row (r, Lk); NaN if a weight is NaN."""
    w = weights.astype(np.float64)
    return np.asarray(-(w * np.log(np.where(w == 0, 1, w))).sum(1))


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _at(weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Each row's weight on its key; 0 if the key does not exist."""
    inside = (keys >= 0) & (keys < weights.shape[1])
    weights_of_keys = np.zeros(len(weights))
    weights_of_keys[inside] = weights[np.flatnonzero(inside), keys[inside]]
    return weights_of_keys


def _mark(thumbnail: np.ndarray, head: HeadPyramid, weights: np.ndarray, visible: np.ndarray, rows: np.ndarray) -> None:
    """Raise the bins of these rows to their largest weights."""
    down, right = thumbnail.shape
    edges = (np.arange(right) * head.length_k + right - 1) // right
    shown = np.where(visible, weights, np.float32(-1))
    np.maximum.at(thumbnail, rows * down // head.length_q, np.maximum.reduceat(shown, edges, axis=1))
