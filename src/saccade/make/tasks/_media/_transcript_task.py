"""Tasks that transcribe each example by CTC if the option `text` is given, and classify it otherwise.

Shape legend: B examples of a batch, L frames, V tokens, N examples of all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor, nn

from ..._task_options import TranscriptOptions
from ...models import Model
from ...models.output_heads import IGNORED
from ...training import Evaluation, Objective, Settings
from .._example_task import Batch, ExampleObjective, ExampleTask
from .._task import Baseline, Details
from ._characters import Characters, characters_of, ctc_loss
from ._files import MediaTask

if TYPE_CHECKING:
    from accelerate import Accelerator

SHOWN = 3  # wrong texts of a report
CHANCE = 0.6  # of the characters are wrong

T = TypeVar("T", bound="TranscriptTask")


@dataclasses.dataclass(frozen=True)
class TranscriptTask(TranscriptOptions, MediaTask):
    """A task of texts or classes. Abstract; its examples have a `text`, too, and its batches `frames` (B,).

    Args:
        text: column of a table; None: examples have classes.
        beams: texts that are searched for at once; 1 takes the most probable token of each frame.
        characters: that the training texts have; learned.
    """

    characters: tuple[str, ...] = ()

    learned = (*MediaTask.learned, "characters")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beams < 1:
            raise ValueError(f"beams: must be at least 1, got {self.beams}")
        of_classes = {"label_smoothing": 0.0, "class_weights": False, "metric": None}
        for name, usual in of_classes.items():
            if self.text is not None and getattr(self, name) != usual:
                raise ValueError(f"{name}: an option of classes, and text={self.text!r} has none; leave it out")

    @property
    def alphabet(self) -> Characters:
        return Characters(self.characters)

    def changed(self: T, options: Mapping[str, Any]) -> T:
        if "text" in options and (options["text"] is None) != (self.text is None):
            trained = "classes" if self.text is None else "texts"
            raise TypeError(f"text: the run was trained on {trained}, got text={options['text']!r}")
        return super().changed(options)

    # --- data ---------------------------------------------------------------------------------------------------------

    def split(self, data: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
        kind = MediaTask if self.text is None else ExampleTask
        return kind.split(self, data, share, seed)

    def fitted(self: T, training: Sequence[Any]) -> T:
        if self.text is None:
            return super().fitted(training)
        return dataclasses.replace(self, characters=characters_of(example.text for example in training))

    def objective(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ) -> Objective:
        if self.text is None:
            return super().objective(model, training, validation, settings)
        return TranscriptObjective(dataclasses.replace(self, beams=1), model, training, validation, settings)

    # --- loss ---------------------------------------------------------------------------------------------------------

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        if self.text is None:
            return super().loss(result, batch, learning=learning)
        return ctc_loss(result, batch["frames"], batch["labels"])

    def weight(self, batch: Batch, *, learning: bool) -> float:
        if self.text is None:
            return super().weight(batch, learning=learning)
        return int((batch["labels"] != IGNORED).sum())

    @property
    def teachable(self) -> bool:
        """Whether a student can learn the outputs: only classes, since two models may write a character at different
        frames."""
        return self.text is None

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[Any]:
        """The text of each example, or the probabilities (K,) of its classes."""
        if self.text is None:
            return super().outputs(model, result, batch)
        return self.alphabet.texts(result, batch["frames"], self.beams)

    # --- metrics and report -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[Any], data: Sequence[Any]) -> dict[str, float]:
        if self.text is None:
            return super().scores(outputs, data)
        return error_rates([example.text for example in data], outputs)

    @property
    def protocol(self) -> str:
        if self.text is None:
            return super().protocol
        return "edits over all texts together, as jiwer counts them; capitals and signs count"

    def cost(self, scores: Mapping[str, float]) -> float:
        return super().cost(scores) if self.text is None else scores["character error"]

    def constant(self, model: Model, training: Sequence[Any], tested: Sequence[Any]) -> Baseline:
        """For texts the empty text, or the most frequent one if that has fewer errors on the training texts."""
        if self.text is None:
            return super().constant(model, training, tested)
        truth = [example.text for example in training]
        [(usual, _)] = Counter(truth).most_common(1)
        errors = error_rates(truth, [usual] * len(truth))
        if errors["character error"] < 1.0:  # that of no text at all
            return Baseline("always writing the most frequent text", [usual] * len(tested))
        return Baseline("writing nothing", [""] * len(tested))

    def details(self, outputs: Sequence[Any], data: Sequence[Any]) -> Details:
        """For texts, the number of wrong texts, and the first of them."""
        if self.text is None:
            return super().details(outputs, data)
        wrong = [(example, text) for example, text in zip(data, outputs, strict=True) if text != example.text]
        shown = [
            {self.thing: self.named(example), "heard": text, "truth": example.text} for example, text in wrong[:SHOWN]
        ]
        lines = [f"{len(wrong):,} texts are wrong, such as these:"] if wrong else []
        lines += ["  ".join(f"{k} {v!r}" for k, v in example.items()) for example in shown]
        return Details({"wrong": len(wrong), "examples_wrong": shown}, "\n".join(lines))

    def shown(self, example: Any, output: Any) -> dict[str, Any]:
        if self.text is None:
            return super().shown(example, output)
        return {self.thing: self.named(example), "text": output}

    def line(self, shown: Mapping[str, Any]) -> str:
        return super().line(shown) if self.text is None else f"{shown['text']}  {shown[self.thing]}"


class TranscriptObjective(ExampleObjective):
    """Evaluations decode greedily: a beam search would take longer than all else.

    CTC first learns to write nothing, and does so for some epochs, when a model that has learned nothing gets more
    characters right by chance. So above `CHANCE` the loss alone says which weights are better.
    """

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        evaluation = super().evaluate(model, accelerator)
        assert evaluation.cost is not None
        return dataclasses.replace(evaluation, cost=min(evaluation.cost, CHANCE))


def error_rates(truth: Sequence[str], texts: Sequence[str]) -> dict[str, float]:
    """Edits per character and per word of the true texts, and the share of right texts."""
    import jiwer

    exact = float(np.mean([text == other for text, other in zip(truth, texts, strict=True)]))
    return {
        "character error": float(jiwer.cer(list(truth), list(texts))),
        "word error": float(jiwer.wer(list(truth), list(texts))),
        "exact": exact,
    }
