"""Metrics of predicted classes, and splits by class.

Shape legend: N examples, K classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ....support._tables import Table
from .._task import Details
from ._confusion import confusion_table

SHOWN = 6  # examples of a picture
_LISTED = 20  # classes


def listed(labels: Sequence[str]) -> str:
    """Names of classes for a message."""
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return ", ".join(map(repr, labels[:_LISTED])) + more


def class_scores(outputs: Sequence[np.ndarray], truth: np.ndarray) -> dict[str, float]:
    """Accuracy and macro F1 of probabilities (N, K) and the numbers (N,) of the right classes."""
    from sklearn.metrics import accuracy_score, f1_score

    predicted = np.argmax(outputs, axis=1)
    return {
        "accuracy": float(accuracy_score(truth, predicted)),
        "macro F1": float(f1_score(truth, predicted, average="macro", zero_division=0)),
    }


def class_details(labels: Sequence[str], outputs: Sequence[np.ndarray], truth: np.ndarray) -> Details:
    """`labels`, `confusion` (truth by rows), and `classes` with precision, recall and F1 of each."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    found, numbers = np.argmax(outputs, axis=1), list(range(len(labels)))
    rows = precision_recall_fscore_support(truth, found, labels=numbers, zero_division=0)
    confusion = confusion_matrix(truth, found, labels=numbers).tolist()
    values = {"labels": list(labels), "confusion": confusion, "classes": by_class(labels, rows)}
    return Details(values, confusion_table(labels, confusion))


def several_scores(outputs: Sequence[np.ndarray], truth: np.ndarray) -> dict[str, float]:
    """F1 and the share of texts with all labels right, of probabilities (N, K) and truth, bool (N, K)."""
    from sklearn.metrics import accuracy_score, f1_score

    predicted = np.asarray(outputs) > 0.5
    return {
        "micro F1": float(f1_score(truth, predicted, average="micro", zero_division=0)),
        "macro F1": float(f1_score(truth, predicted, average="macro", zero_division=0)),
        "subset accuracy": float(accuracy_score(truth, predicted)),
    }


def several_details(labels: Sequence[str], outputs: Sequence[np.ndarray], truth: np.ndarray) -> Details:
    """`labels`, and `classes` with precision, recall and F1 of each."""
    from sklearn.metrics import precision_recall_fscore_support

    rows = precision_recall_fscore_support(truth, np.asarray(outputs) > 0.5, zero_division=0)
    classes = by_class(labels, rows)
    return Details({"labels": list(labels), "classes": classes}, label_table(classes))


def by_class(labels: Sequence[str], rows: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and count of each, as scikit-learn and seqeval give them."""
    names = ("precision", "recall", "F1", "count")
    return {
        label: {name: float(values[n]) for name, values in zip(names, rows, strict=True)}
        for n, label in enumerate(labels)
    }


def label_table(classes: Mapping[str, Mapping[str, float]], name: str = "label") -> str:
    """A line for each label, the most frequent ones first, up to a limit."""
    shown = sorted(classes.items(), key=lambda pair: -pair[1]["count"])[:_LISTED]
    rows = {
        label: {key: f"{value:,.0f}" if key == "count" else f"{value:.4f}" for key, value in row.items()}
        for label, row in shown
    }
    more = [f"and {len(classes) - _LISTED} more"] if len(classes) > _LISTED else []
    return "\n".join([*Table.of_named(rows, name).lines(), *more]) if rows else ""


def stratified(labels: Sequence[str | None], share: float, seed: int) -> set[int]:
    """The numbers of a share of each class's examples; each class keeps at least one."""
    random = np.random.default_rng((seed, 0))
    classes: dict[str, list[int]] = {}
    for n, label in enumerate(labels):
        classes.setdefault(label or "", []).append(n)
    chosen: set[int] = set()
    for _, numbers in sorted(classes.items()):
        count = min(max(round(share * len(numbers)), 1), len(numbers) - 1)
        chosen.update(random.permutation(numbers)[:count].tolist())
    return chosen


def keeping_kinds(kinds: Sequence[Collection[Any]], share: float, seed: int) -> set[int]:
    """The numbers of a random share of the examples; every kind keeps an example that has it.

    Args:
        kinds: of each example, each named once.
    """
    count = min(max(round(share * len(kinds)), 1), len(kinds) - 1)
    left = Counter(kind for found in kinds for kind in found)
    chosen: set[int] = set()
    for n in np.random.default_rng((seed, 0)).permutation(len(kinds)).tolist():
        if len(chosen) < count and all(left[kind] > 1 for kind in kinds[n]):
            chosen.add(n)
            left.subtract(kinds[n])
    return chosen


def worst(outputs: Sequence[np.ndarray], truth: np.ndarray) -> list[int]:
    """Numbers of a few examples: the most certain wrong ones; if none is wrong, the least certain ones."""
    probabilities = np.asarray(outputs)
    right = probabilities[np.arange(len(truth)), truth]
    lead = probabilities.max(axis=1) - right  # 0 where the truth is named
    return np.lexsort((right, -lead))[:SHOWN].tolist()


def heading_of_worst(right: Sequence[bool]) -> str:
    """A heading for the examples of `worst`. `right`: whether each is right."""
    if not any(right):
        return "Wrong, and most sure of it"
    return "Right, and least sure of it" if all(right) else "The wrong ones, and the right ones that are least sure"


def named_as(truth: str, text: str, sure: float) -> str:
    """Two lines above an example: its class, and the predicted one with its probability."""
    return f"{truth}\n{'rightly named' if truth == text else f'taken for {text}'} ({sure:.2f})"


BINS = 15


def expected_calibration_error(probabilities: np.ndarray, truth: np.ndarray, bins: int = BINS) -> float:
    """The mean distance of confidence from accuracy, 0 at best:  sum_b n_b / N |accuracy_b - confidence_b|.

    Examples are put into bins of equal width by the probability of the class that is named, a bin with its upper end.
    Guo et al., "On Calibration of Modern Neural Networks" (2017), equation 3, with their 15 bins.

    Args:
        probabilities: (N, K).
        truth: (N,) numbers of classes.
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == truth
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(places, weights=right - confidence, minlength=bins)  # n_b (accuracy_b - confidence_b)
    return float(np.abs(gaps).sum() / len(truth))
