"""How good predicted classes are, for every task that names classes; and examples split by class.

Shape legend: N examples, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SHOWN = 6  # examples of a picture
_LISTED = 20  # classes


def listed(labels: Sequence[str]) -> str:
    """Names of classes for a message."""
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return ", ".join(map(repr, labels[:_LISTED])) + more


def class_scores(outputs: Sequence[np.ndarray], truth: np.ndarray) -> dict[str, float]:
    """Accuracy and macro F1 of probabilities (N, K) and the numbers (N,) of the right classes."""
    from sklearn.metrics import accuracy_score, f1_score

    found = np.argmax(outputs, axis=1)
    return {
        "accuracy": float(accuracy_score(truth, found)),
        "macro F1": float(f1_score(truth, found, average="macro", zero_division=0)),
    }


def class_details(labels: Sequence[str], outputs: Sequence[np.ndarray], truth: np.ndarray) -> dict[str, Any]:
    """`labels`, `confusion` (truth by rows), and `classes` with precision, recall and F1 of each."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    found, numbers = np.argmax(outputs, axis=1), list(range(len(labels)))
    rows = precision_recall_fscore_support(truth, found, labels=numbers, zero_division=0)
    names = ("precision", "recall", "F1", "count")
    by_class = {
        label: {name: float(values[n]) for name, values in zip(names, rows, strict=True)}
        for n, label in enumerate(labels)
    }
    confusion = confusion_matrix(truth, found, labels=numbers)
    return {"labels": list(labels), "confusion": confusion.tolist(), "classes": by_class}


def stratified(labels: Sequence[str | None], share: float, seed: int) -> set[int]:
    """The numbers of a share of the examples, of each class alike; each class keeps at least one of its examples."""
    random = np.random.default_rng((seed, 0))
    classes: dict[str, list[int]] = {}
    for n, label in enumerate(labels):
        classes.setdefault(label or "", []).append(n)
    chosen: set[int] = set()
    for _, numbers in sorted(classes.items()):
        count = min(max(round(share * len(numbers)), 1), len(numbers) - 1)
        chosen.update(random.permutation(numbers)[:count].tolist())
    return chosen


def worst(outputs: Sequence[np.ndarray], truth: np.ndarray) -> list[int]:
    """Numbers of a few examples, those most surely taken for something else; where none is, of the least sure ones."""
    probabilities = np.asarray(outputs)
    right = probabilities[np.arange(len(truth)), truth]
    lead = probabilities.max(axis=1) - right  # 0 where the truth is named
    return np.lexsort((right, -lead))[:SHOWN].tolist()
