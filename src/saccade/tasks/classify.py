"""`classify`: texts of classes. An encoder or decoder with a linear head on one vector of each text.

Shape legend: B texts of a batch, L tokens of the longest, K classes, N texts of all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import Model
from ..nn.stacks import LayerObserver
from ._baselines import tfidf_regression
from ._calibration import expected_calibration_error
from ._confusion import confusion_picture, confusion_table
from ._example_task import Batch, parted
from ._examples import ENDINGS, TextExample, read_class_folders, read_lines, read_table
from ._task import Baseline, Recipe, Tested
from ._text_task import TextTask, widened

METRICS = {"accuracy": "accuracy", "f1": "macro F1"}  # by option: what it is called in reports
_LISTED = 20  # classes


@dataclasses.dataclass(frozen=True)
class Classify(TextTask):
    """Texts of classes.

    Args:
        text, label: columns of a table.
        skip_empty: leave out texts without a word instead of refusing them.
        label_smoothing: share of the truth that is spread evenly over all classes while learning (Szegedy et al. 2016).
        class_weights: whether rare classes count more while learning: each example by the inverse frequency of its
            class.
        metric: what the best weights are chosen by, "accuracy" or "f1" (the mean over classes).
        labels: the classes, in the order of the model's logits; learned from the training data, as are `weights`.
        weights: of the classes, if they are asked for.
    """

    text: str = "text"
    label: str = "label"
    skip_empty: bool = False
    label_smoothing: float = 0.0
    class_weights: bool = False
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    name = "classify"
    head = "sequence-classification"
    scratch = Recipe(epochs=10, rate=5e-4)
    tuning = Recipe(epochs=3, rate=5e-5)
    learned = ("labels", "weights")
    reading = ("text", "label", "skip_empty", "longest", "long")
    requires = ("sklearn.metrics",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: must be in [0, 1), got {self.label_smoothing}")
        if self.metric not in METRICS:
            raise ValueError(f"metric: expected one of {', '.join(map(repr, METRICS))}, got {self.metric!r}")

    @property
    def label_names(self) -> Sequence[str]:
        return self.labels

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[TextExample]:
        if path.is_dir():
            examples = read_class_folders(path)
        else:
            rows = read_table(path, (self.text, self.label))
            examples = [TextExample(_text(text, place), _label(label, place), place) for place, (text, label) in rows]
        examples = self.without_empty(examples)
        for example in examples:
            if self.labels and example.label not in self.labels:
                raise ValueError(
                    f"{example.place}: the label {example.label!r} is not in the training data, which has "
                    f"{_listed(self.labels)}"
                )
        return examples

    def without_empty(self, examples: list[TextExample]) -> list[TextExample]:
        """The examples that have a word. ValueError where one has none, unless they are to be left out."""
        empty = [example for example in examples if not example.text.strip()]
        if empty and not self.skip_empty:
            raise ValueError(
                f"{empty[0].place}: the text is empty ({len(empty)} of {len(examples)} are); remove such texts, or let "
                "skip_empty leave them out"
            )
        left = [example for example in examples if example.text.strip()]
        if not left:
            raise ValueError(f"{examples[0].place}: no text is left, all {len(examples)} are empty")
        return left

    def split(
        self, data: Sequence[TextExample], share: float, seed: int
    ) -> tuple[list[TextExample], list[TextExample]]:
        """Each class is split alike, and keeps at least one example to train on."""
        random = np.random.default_rng((seed, 0))
        chosen: set[int] = set()
        classes: dict[str, list[int]] = {}
        for n, example in enumerate(data):
            classes.setdefault(example.label or "", []).append(n)
        for _, numbers in sorted(classes.items()):
            count = min(max(round(share * len(numbers)), 1), len(numbers) - 1)
            chosen.update(random.permutation(numbers)[:count].tolist())
        return parted(data, chosen)

    def fitted(self, training: Sequence[TextExample]) -> Classify:
        counts = Counter(example.label or "" for example in training)
        labels = tuple(sorted(counts))
        if len(labels) < 2:
            raise ValueError(f"label: expected two classes or more, every text is {labels[0]!r}")
        rare = tuple(len(training) / (len(labels) * counts[label]) for label in labels)
        return dataclasses.replace(self, labels=labels, weights=rare if self.class_weights else ())

    def inputs(self, texts: Sequence[str]) -> list[TextExample]:
        return self.without_empty([TextExample(text, None, f"text {n}") for n, text in enumerate(texts, 1)])

    def read_inputs(self, path: Path) -> list[TextExample]:
        if path.suffix.lower() not in ENDINGS:
            lines = enumerate(read_lines(path), 1)
            return self.without_empty([TextExample(text, None, f"{path}: line {n}") for n, text in lines])
        rows = read_table(path, (self.text,))
        return self.without_empty([TextExample(_text(text, place), None, place) for place, (text,) in rows])

    def text_of(self, example: TextExample) -> str:
        return example.text

    def encode(self, model: Model, examples: Sequence[TextExample]) -> list[tuple[list[int], int | None]]:
        numbers = {label: n for n, label in enumerate(self.labels)}
        classes = [None if example.label is None else numbers[example.label] for example in examples]
        return list(zip(self.token_ids(model, examples), classes, strict=True))

    def length(self, item: tuple[list[int], int | None]) -> int:
        return len(item[0])

    def collate(
        self, model: Model, items: Sequence[tuple[list[int], int | None]], random: np.random.Generator | None = None
    ) -> Batch:
        batch = self.padded(model, [ids for ids, _ in items])
        classes = [label for _, label in items if label is not None]
        return {**batch, "labels": torch.tensor(classes)} if len(classes) == len(items) else batch

    # --- loss ---------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """The logits (B, K)."""
        logits = self.called(model, batch, observe).logits
        assert logits is not None
        return widened(logits)

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        if not learning:
            return F.cross_entropy(result, batch["labels"])
        weights = torch.tensor(self.weights, device=result.device, dtype=result.dtype) if self.weights else None
        return F.cross_entropy(result, batch["labels"], weight=weights, label_smoothing=self.label_smoothing)

    def weight(self, batch: Batch, *, learning: bool) -> float:
        labels = batch["labels"].tolist()
        return sum(self.weights[label] for label in labels) if self.weights and learning else len(labels)

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[np.ndarray]:
        """The probabilities (K,) of each text, float64."""
        return list(result.double().softmax(-1).cpu().numpy())

    # --- metric and picture -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[np.ndarray], data: Sequence[TextExample]) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        truth, found = self._truth(data), np.argmax(outputs, axis=1)
        return {
            "accuracy": float(accuracy_score(truth, found)),
            "macro F1": float(f1_score(truth, found, average="macro", zero_division=0)),
            "calibration error": expected_calibration_error(np.asarray(outputs), truth),
        }

    def cost(self, scores: Mapping[str, float]) -> float:
        return -scores[METRICS[self.metric]]

    def baselines(
        self, training: Sequence[TextExample], validation: Sequence[TextExample], tested: Sequence[TextExample]
    ) -> list[Baseline]:
        known, judged = ([example.text for example in part] for part in (training, validation))
        outputs, strength = tfidf_regression(
            (known, self._truth(training)), (judged, self._truth(validation)), [example.text for example in tested]
        )
        return [Baseline(f"TF-IDF with logistic regression (C = {strength:g})", list(outputs))]

    def details(self, outputs: Sequence[np.ndarray], data: Sequence[TextExample]) -> dict[str, Any]:
        """`labels`, `confusion` (truth by rows), and `classes` with precision, recall and F1 of each."""
        from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

        truth, found, numbers = self._truth(data), np.argmax(outputs, axis=1), list(range(len(self.labels)))
        rows = precision_recall_fscore_support(truth, found, labels=numbers, zero_division=0)
        names = ("precision", "recall", "F1", "count")
        by_class = {
            label: {name: float(values[n]) for name, values in zip(names, rows, strict=True)}
            for n, label in enumerate(self.labels)
        }
        confusion = confusion_matrix(truth, found, labels=numbers)
        return {"labels": list(self.labels), "confusion": confusion.tolist(), "classes": by_class}

    def table(self, details: Mapping[str, Any]) -> str:
        return confusion_table(details["labels"], details["confusion"])

    def picture(self, tested: Tested, kind: str) -> bytes:
        return confusion_picture(tested.details["labels"], tested.details["confusion"], kind)

    def shown(self, example: TextExample, output: np.ndarray) -> dict[str, Any]:
        probabilities = dict(zip(self.labels, output.tolist(), strict=True))
        return {
            "text": example.text,
            "label": max(probabilities, key=probabilities.__getitem__),
            "probabilities": probabilities,
        }

    def line(self, shown: Mapping[str, Any]) -> str:
        likely = sorted(shown["probabilities"].items(), key=lambda pair: -pair[1])[:3]
        return f"{', '.join(f'{label} {share:.3f}' for label, share in likely)}  {' '.join(shown['text'].split())}"

    def _truth(self, data: Sequence[TextExample]) -> np.ndarray:
        numbers = {label: n for n, label in enumerate(self.labels)}
        return np.array([numbers[example.label or ""] for example in data])


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text, got {value!r:.40}")
    return value


def _label(value: Any, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise ValueError(f"{place}: expected a label, a word or an integer, got {value!r:.40}")
    return str(value)


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return ", ".join(map(repr, labels[:_LISTED])) + more
