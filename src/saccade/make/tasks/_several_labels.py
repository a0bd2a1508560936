"""`classify` of texts that have any number of labels: a yes or no for each label.

Shape legend: B texts of a batch, K labels, N texts of all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...support._numbers import named_values
from ..models import Model
from ..training import Evaluation, Settings
from ._baselines import tfidf_one_vs_rest
from ._classes._class_task import label_of
from ._classes._results import keeping_kinds, several_details, several_scores
from ._example_task import Batch, ExampleObjective, parted
from ._examples import TextExample
from ._task import Baseline, Details, Tested
from ._texts._word_picture import WordPanel, most_sure, picture_above_words, present
from .classify import Classify

if TYPE_CHECKING:
    from accelerate import Accelerator

# By option: what reports compare by.
METRICS = {None: "micro F1", "accuracy": "subset accuracy", "f1": "macro F1"}


class LossObjective(ExampleObjective):
    """Weights are selected by the loss: metrics are noisy while few probabilities are above one half."""

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        return dataclasses.replace(super().evaluate(model, accelerator), cost=None)


@dataclasses.dataclass(frozen=True)
class ClassifySeveral(Classify):
    r"""Texts of any number of labels: a cell with `several` between them, or a list. Other options as of `Classify`.

    The best weights are those with the lowest loss, unless a `metric` is given. A label is predicted where its
    probability is above one half. With `class_weights`, the texts that have a rare label count as much in the loss as
    those that do not.

    Raises:
        ValueError: an option outside of its range; no `several`.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "films.csv")
        ...     _ = path.write_text("text,label\na film,drama;crime\nanother,\n")
        ...     examples = saccade.tasks.ClassifySeveral(several=";").read(path)
        >>> [example.label for example in examples]
        [('drama', 'crime'), ()]
    """

    takes_several = True
    problem = "multi_label_classification"
    protocol = "F1 as scikit-learn counts it; a label is said where its probability is above one half"

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[TextExample]:
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; expected a table, where a text may have several labels")
        return super().read(path)

    def label_in(self, cell: Any, place: str) -> tuple[str, ...]:
        """The labels of a cell, without duplicates; an empty cell has none."""
        parts = cell.split(self.several) if isinstance(cell, str) else cell if isinstance(cell, list) else [cell]
        names = [part.strip() if isinstance(part, str) else part for part in parts]
        return tuple(dict.fromkeys(label_of(name, place) for name in names if name != ""))

    def check_known(self, labelled: Iterable[tuple[Any, str]]) -> None:
        super().check_known((label, place) for labels, place in labelled for label in labels)

    def split(self, data: Sequence[TextExample], share: float, seed: int) -> tuple[list[Any], list[Any]]:
        """A random split in which each label keeps a text to train on."""
        return parted(data, keeping_kinds([_labels(example) for example in data], share, seed))

    def fitted(self, training: Sequence[TextExample]) -> ClassifySeveral:
        counts = Counter(label for example in training for label in _labels(example))
        labels = tuple(sorted(counts))
        if len(labels) < 2:
            raise ValueError(f"label: expected two labels or more, the texts have {len(labels)}")
        rare = tuple(max(len(training) - counts[label], 1) / counts[label] for label in labels)
        return dataclasses.replace(self, labels=labels, weights=rare if self.class_weights else ())

    def truth(self, data: Sequence[TextExample]) -> np.ndarray:
        """Whether each text has each label, bool (N, K)."""
        return np.array([[label in _labels(example) for label in self.labels] for example in data])

    def constant(self, model: Model, training: Sequence[Any], tested: Sequence[Any]) -> Baseline:
        return Baseline("naming no label", [np.zeros(len(self.labels))] * len(tested))

    def class_numbers(self, examples: Sequence[TextExample]) -> list[Any]:
        """For `encode`: 0.0 or 1.0 for each label; None for an example without known labels."""
        rows: list[Any] = self.truth(examples).astype(float).tolist()
        return [None if example.label is None else row for example, row in zip(examples, rows, strict=True)]

    def objective(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ) -> ExampleObjective:
        judged_by_loss = self.metric is None
        return (LossObjective if judged_by_loss else ExampleObjective)(self, model, training, validation, settings)

    def labelled(self, examples: Sequence[Any], outputs: Sequence[np.ndarray]) -> list[Any]:
        """The examples with the labels whose probability is above one half."""
        pairs = zip(examples, outputs, strict=True)
        return [
            dataclasses.replace(example, label=tuple(self.labels[n] for n in np.flatnonzero(output > 0.5)))
            for example, output in pairs
        ]

    # --- loss ---------------------------------------------------------------------------------------------------------

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        """The binary cross-entropy of logits, the mean over texts and labels."""
        result, truth = self.of_texts(result, batch), self.truths(batch)["labels"].to(result)
        if not learning:
            return F.binary_cross_entropy_with_logits(result, truth)
        rare = torch.tensor(self.weights, device=result.device, dtype=result.dtype) if self.weights else None
        smooth = truth * (1 - self.label_smoothing) + self.label_smoothing / 2
        return F.binary_cross_entropy_with_logits(result, smooth, pos_weight=rare)

    def weight(self, batch: Batch, *, learning: bool) -> float:
        return int(batch["texts"][-1]) + 1

    def logits(self, result: Tensor, batch: Batch) -> list[Tensor]:
        """A row (T K, 2) for each text and label, no and yes: the softmax of (0, x) is the sigmoid of x."""
        yes = self.of_texts(result, batch).reshape(-1)
        return [torch.stack((torch.zeros_like(yes), yes), -1)]

    def row_weights(self, batch: Batch) -> None:
        return None

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[np.ndarray]:
        """The probability (K,) of each label, float64."""
        return list(self.of_texts(result, batch).double().sigmoid().cpu().numpy())

    # --- metrics and report -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[np.ndarray], data: Sequence[TextExample]) -> dict[str, float]:
        return several_scores(outputs, self.truth(data))

    def cost(self, scores: Mapping[str, float]) -> float:
        return -scores[METRICS[self.metric]]

    def details(self, outputs: Sequence[np.ndarray], data: Sequence[TextExample]) -> Details:
        return several_details(self.labels, outputs, self.truth(data))

    def picture(self, tested: Tested, kind: str) -> bytes:
        """Precision and recall of each label, and word shares of the most certain wrong and right answers."""
        probabilities, truth = np.asarray(tested.outputs), self.truth(tested.data)
        given = probabilities > 0.5
        sure = np.where(~given & ~truth, -1.0, np.abs(probabilities - 0.5))  # what is not there tells little
        chosen = [divmod(n, len(self.labels)) for n in most_sure(sure.ravel(), (given == truth).ravel())]
        panels = [self._answer(tested, text, label, bool(truth[text, label])) for text, label in chosen]
        classes = tested.details["classes"]
        size = 7.0, label_height(len(classes))
        return picture_above_words(size, lambda figure: draw_labels(figure, classes), present(panels), kind)

    def _answer(self, tested: Tested, text: int, label: int, truth: bool) -> WordPanel | None:
        """The contribution of each word to a label's logit; to minus the logit if the label is not predicted."""
        share = tested.outputs[text][label]
        told = "rightly" if (share > 0.5) == truth else "wrongly"
        return self._label_panel(tested.model, tested.data[text], label, share, f", {told}")

    def _label_panel(
        self, model: Model, example: TextExample, label: int, share: float, message: str
    ) -> WordPanel | None:
        sign, answer = (1, "") if share > 0.5 else (-1, "not ")
        title = f"{answer}{self.labels[label]} ({max(share, 1 - share):.2f}){message}"
        return self.panel(model, example, title, lambda logits: sign * logits[:, label])

    def words_of(self, model: Model, example: TextExample, output: np.ndarray) -> list[WordPanel | None]:
        """The predicted labels; without any, the most probable one."""
        named = [n for n in np.argsort(-output).tolist() if output[n] > 0.5] or [int(np.argmax(output))]
        return [self._label_panel(model, example, n, output[n], "") for n in named]

    def baselines(
        self,
        model: Model,
        training: Sequence[TextExample],
        validation: Sequence[TextExample],
        tested: Sequence[TextExample],
    ) -> list[Baseline]:
        known, judged = (([example.text for example in part], self.truth(part)) for part in (training, validation))
        outputs, strength = tfidf_one_vs_rest(known, judged, [example.text for example in tested])
        return [Baseline(f"TF-IDF with logistic regression of each label (C = {strength:g})", list(outputs))]

    def shown(self, example: TextExample, output: np.ndarray) -> dict[str, Any]:
        probabilities = dict(zip(self.labels, output.tolist(), strict=True))
        labels = [label for label, share in probabilities.items() if share > 0.5]
        return {self.thing: self.named(example), "labels": labels, "probabilities": probabilities}

    def line(self, shown: Mapping[str, Any]) -> str:
        likely = sorted(shown["probabilities"].items(), key=lambda pair: -pair[1])
        found = named_values((label, share) for label, share in likely if label in shown["labels"])
        none = f"none (most probable: {named_values(likely[:1])})"
        return f"{found or none}  {' '.join(shown[self.thing].split())}"


def _labels(example: TextExample) -> tuple[str, ...]:
    return example.label if isinstance(example.label, tuple) else ()


def label_height(count: int) -> float:
    """The height in inches for `count` labels."""
    return min(1.5 + 0.3 * count, 16.0)


def draw_labels(figure: Any, classes: Mapping[str, Mapping[str, float]]) -> None:
    """Draw precision and recall of each label into a matplotlib figure."""
    axes = figure.subplots()
    rows = sorted(classes.items(), key=lambda pair: pair[1]["count"])
    places = range(len(rows))
    ends = [sorted((row["precision"], row["recall"])) for _, row in rows]
    axes.hlines(places, [low for low, _ in ends], [high for _, high in ends], color="silver")
    axes.scatter([row["precision"] for _, row in rows], places, label="precision", zorder=2)
    hollow = {"facecolors": "none", "edgecolors": "tab:orange", "linewidths": 1.6}  # a precision as high shows inside
    axes.scatter([row["recall"] for _, row in rows], places, s=90, marker="s", label="recall", zorder=3, **hollow)
    axes.set_yticks(places, [f"{label} ({row['count']:,.0f})" for label, row in rows])
    axes.set(xlim=(-0.03, 1.03), ylim=(-0.6, len(rows) - 0.4), xlabel="precision, recall", ylabel="label (texts)")
    axes.grid(axis="x", color="whitesmoke")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize="small")
