"""A head in a few numbers and a small map: from all rows of a short text, from some spread over a long one.

Shape legend: r rows that are looked at, Lk keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ._head import HeadMap

THUMBNAIL = 48  # bins of a small map, on each side
_ALL = 2**21  # pairs of a head up to which all rows are taken
_ROWS = 2  # rows of each bin otherwise


@dataclass(frozen=True, eq=False)
class HeadSummary:
    """``sampled``: from so many rows, 0: from all. Means over rows that see a key; entropy in nats, distance in tokens.

    ``thumbnail`` (48, 48) or smaller: the largest weight of each bin, NaN where nothing is visible.
    """

    call: str
    head: int
    sampled: int
    thumbnail: np.ndarray
    numbers: dict[str, float]
    role: dict[str, Any] | None = None
    alarms: list[str] = field(default_factory=list)


def summary(head: HeadMap, role: dict[str, Any] | None, alarms: list[str]) -> HeadSummary:
    """The head's numbers and its small map."""
    rows = _chosen(head.length_q, head.length_k)
    weights, counts = head.weights_and_visible(rows)
    sampled = 0 if len(rows) == head.length_q else len(rows)
    numbers = _numbers(weights, counts, rows.numpy() + head.call.placed_for(head.item))
    return HeadSummary(head.call.id, head.head, sampled, _thumbnail(head, weights, counts, rows), numbers, role, alarms)


def _chosen(rows: int, keys: int) -> torch.Tensor:
    """All rows, or some of each bin of the small map."""
    if rows * keys <= _ALL:
        return torch.arange(rows)
    edges = torch.linspace(0, rows, THUMBNAIL * _ROWS + 1)[1:].ceil().long() - 1
    return torch.unique(edges.clamp(0, rows - 1))


def _numbers(weights: np.ndarray, visible: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Means over the rows that see a key."""
    rows = np.flatnonzero(visible.any(1))
    if not len(rows):
        return dict.fromkeys(
            ("entropy", "evenness", "largest", "distance", "self", "previous", "next", "first", "sink"), float("nan")
        )
    w, seen, own = weights[rows].astype(np.float64), visible[rows], own[rows]
    entropy = -np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0).sum(1)
    count = seen.sum(1)
    share = w.sum(1)
    among = entropy / np.where(share > 0, share, 1) + np.log(np.where(share > 0, share, 1))
    evenness = (among / np.log(np.maximum(count, 2)))[count > 1].clip(0, 1)
    first = int(np.flatnonzero(visible.any(0))[0])
    keys = np.arange(w.shape[1])
    return {
        "entropy": float(entropy.mean()),
        "evenness": float(evenness.mean()) if len(evenness) else float("nan"),
        "largest": float(w.max(1).mean()),
        "distance": float((w * np.abs(own[:, None] - keys)).sum(1).mean()),
        "self": _mass(w, own),
        "previous": _mass(w, own - 1),
        "next": _mass(w, own + 1),
        "first": float(w[:, first].mean()),
        "sink": float((1 - share).clip(0).mean()),
    }


def _mass(weights: np.ndarray, keys: np.ndarray) -> float:
    inside = (keys >= 0) & (keys < weights.shape[1])
    found = np.zeros(len(weights))
    found[inside] = weights[np.flatnonzero(inside), keys[inside]]
    return float(found.mean())


def _thumbnail(head: HeadMap, weights: np.ndarray, visible: np.ndarray, rows: torch.Tensor) -> np.ndarray:
    down, right = min(THUMBNAIL, head.length_q), min(THUMBNAIL, head.length_k)
    of_row = (rows.numpy() * down) // head.length_q
    key_edges = (np.arange(right) * head.length_k + right - 1) // right
    shown = np.where(visible, weights, -1.0)
    by_key = np.maximum.reduceat(shown, key_edges, axis=1)
    out = np.full((down, right), -1.0, np.float32)
    np.maximum.at(out, of_row, by_key)
    return np.where(out < 0, np.nan, out).astype(np.float32)
