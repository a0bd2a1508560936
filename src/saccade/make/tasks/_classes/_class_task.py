"""Tasks whose examples have one class each: split, loss, metrics and report.

Shape legend: B examples of a batch, K classes, N examples of all.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....support._numbers import named_values
from ..._task_options import ClassOptions
from ...models import Model
from .._baselines import MOST_FREQUENT, most_frequent_class
from .._example_task import Batch, ExampleTask, parted
from .._task import Baseline, Details, Tested
from ._confusion import confusion_picture
from ._results import class_details, class_scores, expected_calibration_error, listed, stratified

METRICS = {"accuracy": "accuracy", "f1": "macro F1"}  # by option: what it is called in reports

T = TypeVar("T", bound="ClassTask")


@dataclasses.dataclass(frozen=True)
class ClassTask(ClassOptions, ExampleTask):
    """A task of classes. Abstract; its examples have a `label`, None if unknown, and a `place` for messages.

    Args:
        label: column of a table.
        label_smoothing: share of the truth that is spread evenly over all classes while learning (Szegedy et al. 2016).
        class_weights: whether rare classes count more while learning: each example by the inverse frequency of its
            class.
        metric: what the best weights are chosen by, "accuracy" (None) or "f1" (the mean over classes).
        labels: the classes, in the order of the model's logits; learned from the training data, as are `weights`.
        weights: of the classes, if they are asked for.

    Attributes:
        thing: what an example is called.

    Example:
        >>> import saccade
        >>> task = saccade.tasks.Classify(labels=("no", "yes"))
        >>> isinstance(task, saccade.tasks.ClassTask), task.label_names
        (True, ('no', 'yes'))
    """

    labels: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    thing: ClassVar[str]
    learned: ClassVar[tuple[str, ...]] = ("labels", "weights")

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing: must be in [0, 1), got {self.label_smoothing}")
        if self.metric not in (None, *METRICS):
            raise ValueError(f"metric: expected one of {', '.join(map(repr, METRICS))}, got {self.metric!r}")

    # --- data ---------------------------------------------------------------------------------------------------------

    def check_known(self, labelled: Iterable[tuple[Any, str]]) -> None:
        """ValueError for a label that a fitted task does not know. `labelled`: labels and their places."""
        for label, place in labelled:
            if self.labels and label not in self.labels:
                raise ValueError(
                    f"{place}: the label {label!r} is not in the training data, which has {listed(self.labels)}"
                )

    def split(self, data: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
        """The same share of each class, which keeps at least one training example."""
        return parted(data, stratified([example.label for example in data], share, seed))

    def fitted(self: T, training: Sequence[Any]) -> T:
        counts = Counter(example.label or "" for example in training)
        labels = tuple(sorted(counts))
        if len(labels) < 2:
            raise ValueError(
                f"label: expected two classes or more, every {self.thing} is {labels[0]!r} (one of them: "
                f"{training[0].place})"
            )
        rare = tuple(len(training) / (len(labels) * counts[label]) for label in labels)
        return dataclasses.replace(self, labels=labels, weights=rare if self.class_weights else ())

    def truth(self, data: Sequence[Any]) -> np.ndarray:
        """The numbers (N,) of the examples' classes."""
        numbers = {label: n for n, label in enumerate(self.labels)}
        return np.array([numbers[example.label or ""] for example in data])

    def class_numbers(self, examples: Sequence[Any]) -> list[int | None]:
        """The numbers of the classes for `encode`: None for an example without a label."""
        numbers = {label: n for n, label in enumerate(self.labels)}
        return [None if example.label is None else numbers[example.label] for example in examples]

    @property
    def label_names(self) -> Sequence[str]:
        return self.labels

    def labelled(self: T, examples: Sequence[Any], outputs: Sequence[np.ndarray]) -> list[Any]:
        """The examples with the most probable classes of a model's outputs."""
        pairs = zip(examples, outputs, strict=True)
        return [dataclasses.replace(example, label=self.labels[int(output.argmax())]) for example, output in pairs]

    # --- loss ---------------------------------------------------------------------------------------------------------

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        """The cross-entropy of logits (B, K)."""
        if not learning:
            return F.cross_entropy(result, batch["labels"])
        weights = torch.tensor(self.weights, device=result.device, dtype=result.dtype) if self.weights else None
        return F.cross_entropy(result, batch["labels"], weight=weights, label_smoothing=self.label_smoothing)

    def weight(self, batch: Batch, *, learning: bool) -> float:
        labels = batch["labels"].tolist()
        return sum(self.weights[label] for label in labels) if self.weights and learning else len(labels)

    def logits(self, result: Tensor, batch: Batch) -> list[Tensor]:
        return [result]

    def row_weights(self, batch: Batch) -> Tensor | None:
        return torch.tensor(self.weights, device=batch["labels"].device)[batch["labels"]] if self.weights else None

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[np.ndarray]:
        """The probabilities (K,) of each example, float64."""
        return list(result.double().softmax(-1).cpu().numpy())

    # --- metrics and report -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[np.ndarray], data: Sequence[Any]) -> dict[str, float]:
        truth = self.truth(data)
        calibration = expected_calibration_error(np.asarray(outputs), truth)
        return {**class_scores(outputs, truth), "calibration error": calibration}

    def constant(self, model: Model, training: Sequence[Any], tested: Sequence[Any]) -> Baseline:
        return Baseline(MOST_FREQUENT, most_frequent_class(self.truth(training), len(self.labels), len(tested)))

    @property
    def protocol(self) -> str:
        return "accuracy and macro F1 as scikit-learn counts them, calibration error over 15 bins"

    def cost(self, scores: Mapping[str, float]) -> float:
        return -scores[METRICS[self.metric or "accuracy"]]

    def details(self, outputs: Sequence[np.ndarray], data: Sequence[Any]) -> Details:
        return class_details(self.labels, outputs, self.truth(data))

    def picture(self, tested: Tested, kind: str) -> bytes:
        return confusion_picture(tested.details["labels"], tested.details["confusion"], kind)

    @abstractmethod
    def named(self, example: Any) -> str:
        """The text that identifies the example in a prediction."""

    def shown(self, example: Any, output: np.ndarray) -> dict[str, Any]:
        probabilities = dict(zip(self.labels, output.tolist(), strict=True))
        return {
            self.thing: self.named(example),
            "label": max(probabilities, key=probabilities.__getitem__),
            "probabilities": probabilities,
        }

    def line(self, shown: Mapping[str, Any]) -> str:
        likely = sorted(shown["probabilities"].items(), key=lambda pair: -pair[1])[:3]
        return f"{named_values(likely)}  {' '.join(shown[self.thing].split())}"


def label_of(value: Any, place: str) -> str:
    """The class in a cell, without spaces around it. ValueError if there is none."""
    label = "" if isinstance(value, bool) or not isinstance(value, (str, int)) else str(value).strip()
    if not label:
        raise ValueError(f"{place}: expected a label, a word or an integer, got {value!r:.40}")
    return label
