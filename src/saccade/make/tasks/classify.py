"""`classify`: texts of classes. An encoder or decoder with a linear head on one vector of each text.

Shape legend: T texts of a batch, B their rows, L tokens of the longest, K classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from ...support._restored import evaluating
from .._task_registry import ClassifyOptions
from ..models import Model
from ._baselines import tfidf_regression
from ._classes._class_task import ClassTask, label_of
from ._classes._confusion import draw_confusion, side_of
from ._example_task import Batch, widened
from ._examples import ENDINGS, TextExample, UnusableExamples, read_content, read_lines, read_table, warn_left_out
from ._media._files import Media
from ._task import Baseline, Tested
from ._texts._reader import AnyTokenizer, padded, text_output
from ._texts._text_task import EncoderTask
from ._texts._word_picture import PREDICTED, WordPanel, most_sure, picture_above_words, present, words_picture
from ._texts._word_shares import word_shares

TEXTS = Media("a .txt file", (".txt",))
Item = tuple[list[list[int]], Any]
"""The tokens of a text's windows (mostly one), and the number of its class, None if unknown."""


@dataclasses.dataclass(frozen=True)
class Classify(ClassifyOptions, ClassTask, EncoderTask):
    r"""Texts of classes.

    A picture of words shows integrated gradients from the mean of all embeddings. If the model predicts the same class
    without the words, they add little. BART reads a text twice and has no such picture.

    Args:
        text: column of a table.
        several: what stands between the labels of a text that may have any number of them; such a task is a
            `ClassifySeveral`. None: each text has one class.
        skip_empty: leave out texts without a word and rows without a label, with a warning that counts them, instead of
            raising an error.
        long: "slide": overlapping windows over texts that are too long; a text's logits are the means over them; "cut":
            only their beginnings are read; "refuse": an error.
        label, label_smoothing, class_weights, metric: as in every task of classes.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "reviews.csv")
        ...     _ = path.write_text("review,stars\na good film,5\na bad film,1\n")
        ...     examples = saccade.tasks.Classify(text="review", label="stars").read(path)
        >>> [(example.text, example.label) for example in examples]
        [('a good film', '5'), ('a bad film', '1')]
    """

    takes_several: ClassVar[bool] = False
    problem: ClassVar[str | None] = None  # as config.json names it

    thing = "text"
    head = "sequence-classification"
    longs = ("cut", "slide", "refuse")
    requires = ("sklearn.metrics",)

    def __post_init__(self) -> None:
        ClassTask.__post_init__(self)
        EncoderTask.__post_init__(self)
        if self.takes_several != bool(self.several):
            raise ValueError(
                "several: expected the separator of labels, such as ';', for ClassifySeveral, and None for Classify, "
                f"got {self.several!r}"
            )

    def read(self, path: Path) -> list[TextExample]:
        if path.is_dir():
            examples = [
                TextExample(read_content(file), name, place) for file, name, place in TEXTS.in_class_folders(path)
            ]
        else:
            rows = self._with_labels(read_table(path, (self.text, self.label)))
            examples = [
                TextExample(_text(text, place), self.label_in(label, place), place) for place, (text, label) in rows
            ]
        examples = self.without_empty(examples)
        self.check_known((example.label, example.place) for example in examples)
        return examples

    def label_in(self, cell: Any, place: str) -> Any:
        """The label in a cell."""
        if isinstance(cell, list):
            raise ValueError(
                f"{place}: expected a label, a word or an integer, got {cell!r:.40}; give several for more than one"
            )
        return label_of(cell, place)

    def _with_labels(self, rows: list[tuple[str, tuple[Any, ...]]]) -> list[tuple[str, tuple[Any, ...]]]:
        """The rows that have a label. ValueError if a row has none, unless such rows are to be left out."""
        if self.takes_several:  # no label is an answer, too
            return rows
        empty = [place for place, (_, label) in rows if label is None or not str(label).strip()]
        if empty and not self.skip_empty:
            blank = [place for place, (text, _) in rows if isinstance(text, str) and not text.strip()]
            also = f"{blank[0]}: the text is empty ({len(blank)} of {len(rows)} are); " if blank else ""
            problem = f"{self.label!r} is empty, expected a label ({len(empty)} of {len(rows)} rows are so)"
            raise UnusableExamples(f"{empty[0]}: {problem}; {also}remove such rows", "skip_empty")
        warn_left_out(empty, len(rows), "rows have no label and are")
        without = set(empty)
        return [row for row in rows if row[0] not in without]

    def without_empty(self, examples: list[TextExample]) -> list[TextExample]:
        """The examples whose text has a word. ValueError if a text has none, unless such texts are to be left out."""
        left = [example for example in self._with_words(examples) if not self.is_empty(example)]
        empty = [example.place for example in examples if self.is_empty(example)]
        warn_left_out(empty, len(examples), "texts are empty and")
        return left

    def _with_words(self, examples: list[TextExample]) -> list[TextExample]:
        """All examples. ValueError if a text has no word, unless such texts are to be left out, or if all are empty."""
        empty = [example for example in examples if self.is_empty(example)]
        if empty and not self.skip_empty:
            problem = f"the text is empty ({len(empty)} of {len(examples)} are); remove such texts"
            raise UnusableExamples(f"{empty[0].place}: {problem}", "skip_empty")
        if len(empty) == len(examples):
            raise ValueError(f"{examples[0].place}: no text is left, all {len(examples)} are empty")
        return examples

    def is_empty(self, example: TextExample) -> bool:
        return not example.text.strip()

    def inputs(self, texts: Sequence[str]) -> list[TextExample]:
        return self._with_words([TextExample(text, None, f"text {n}") for n, text in enumerate(texts, 1)])

    def read_inputs(self, path: Path) -> list[TextExample]:
        if path.is_dir():
            files = TEXTS.listed(path, self.text)
            return self._with_words([TextExample(read_content(file), None, place) for file, _, place in files])
        if path.suffix.lower() not in ENDINGS:
            lines = enumerate(read_lines(path), 1)
            return self._with_words([TextExample(text, None, f"{path}: line {n}") for n, text in lines])
        rows = read_table(path, (self.text,))
        return self._with_words([TextExample(_text(text, place), None, place) for place, (text,) in rows])

    def new_model(self, training: Sequence[Any]) -> Model:
        return self._marked(super().new_model(training))

    def open_model(self, source: Path | str) -> Model:
        return self._marked(super().open_model(source))

    def _marked(self, model: Model) -> Model:
        """The model, with the kind of labels in its config.json; a checkpoint may have another kind."""
        model.settings.values.pop("problem_type", None)
        if self.problem is not None:
            model.settings.values["problem_type"] = self.problem
        return model

    def text_of(self, example: TextExample) -> str:
        return example.text

    named = text_of

    def encode(self, model: Model, examples: Sequence[TextExample]) -> list[Item]:
        rows = self.windows(model.tokenizer, examples) if self.long == "slide" else None
        rows = rows or [
            [ids]
            for ids in self.reader.token_ids(
                model.tokenizer, [example.text for example in examples], [example.place for example in examples]
            )
        ]
        return list(zip(rows, self.class_numbers(examples), strict=True))

    def windows(self, tokenizer: AnyTokenizer, examples: Sequence[TextExample]) -> list[list[list[int]]]:
        """The tokens of each text's windows, the special ones included."""
        rows = []
        for example in examples:
            ids = tokenizer.encode(example.text).ids
            parts = self.reader.parts(tokenizer, len(ids), len(tokenizer.before) + len(tokenizer.after))
            rows.append([[*tokenizer.before, *ids[part.start : part.stop], *tokenizer.after] for part in parts])
        return rows

    def length(self, item: Item) -> int:
        return sum(map(len, item[0]))

    def rows(self, item: Item) -> int:
        return len(item[0])

    def collate(self, model: Model, items: Sequence[Item], random: np.random.Generator | None = None) -> Batch:
        """Tokens; the number of each row's text, `texts` (B,); and that text's class, `labels`."""
        batch = padded(model, [ids for rows, _ in items for ids in rows])
        batch["texts"] = torch.tensor([n for n, (rows, _) in enumerate(items) for _ in rows])
        classes = [label for _, label in items if label is not None]
        known = len(classes) == len(items)
        return {**batch, "labels": torch.tensor(classes)[batch["texts"]]} if known else batch

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """The logits (B, K) of the rows, of which a long text may have several."""
        logits = text_output(model, batch, observe).logits
        assert logits is not None
        return widened(logits)

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        return super().loss(self.of_texts(result, batch), self.truths(batch), learning=learning)

    def weight(self, batch: Batch, *, learning: bool) -> float:
        return super().weight(self.truths(batch), learning=learning)

    def logits(self, result: Tensor, batch: Batch) -> list[Tensor]:
        return super().logits(self.of_texts(result, batch), batch)

    def row_weights(self, batch: Batch) -> Tensor | None:
        return super().row_weights(self.truths(batch))

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[np.ndarray]:
        return super().outputs(model, self.of_texts(result, batch), batch)

    def of_texts(self, result: Tensor, batch: Batch) -> Tensor:
        """The logits (T, K) of the texts: the means over their windows'."""
        counts = torch.bincount(batch["texts"])
        if len(counts) == len(result):
            return result
        return result.new_zeros(len(counts), result.shape[1]).index_add(0, batch["texts"], result) / counts[:, None]

    def truths(self, batch: Batch) -> Batch:
        """The labels (T, ...) of the texts, from the labels of their windows."""
        counts = torch.bincount(batch["texts"])
        return {"labels": batch["labels"][counts.cumsum(0) - counts]}

    def picture(self, tested: Tested, kind: str) -> bytes:
        """The confusion matrix, and below it word shares of the most certain wrong and right predictions."""
        labels, counts = tested.details["labels"], tested.details["confusion"]
        side = side_of(labels)
        found, truth = np.argmax(tested.outputs, axis=1), self.truth(tested.data)
        chosen = most_sure(np.max(tested.outputs, axis=1), found == truth)
        panels = [self._panel(tested.model, tested.data[n], tested.outputs[n], int(truth[n])) for n in chosen]
        return picture_above_words(
            (side + 1, side), lambda figure: draw_confusion(figure, labels, counts), present(panels), kind
        )

    def predicted_picture(
        self, model: Model, data: Sequence[TextExample], outputs: Sequence[np.ndarray], kind: str
    ) -> bytes:
        """Word shares of the first texts."""
        pairs = list(zip(data, outputs, strict=True))[:PREDICTED]
        panels = present(panel for example, output in pairs for panel in self.words_of(model, example, output))
        if not panels:
            raise ValueError(f"picture: word contributions are not available for {model.family.name}")
        return words_picture(panels, kind)

    def words_of(self, model: Model, example: TextExample, output: np.ndarray) -> list[WordPanel | None]:
        """Word shares of a text, for each predicted label."""
        return [self._panel(model, example, output)]

    def _panel(
        self, model: Model, example: TextExample, output: np.ndarray, truth: int | None = None
    ) -> WordPanel | None:
        """Contributions of words to the predicted class's logit, minus that of the true class, or of the next."""
        named, second = np.argsort(-output, kind="stable")[:2].tolist()
        wrong = truth is not None and truth != named
        other = truth if wrong else second
        verdict = "" if truth is None else f", but it is {self.labels[truth]}" if wrong else ", rightly"
        title = f"{self.labels[named]} ({output[named]:.2f}){verdict}"
        return self.panel(model, example, title, lambda logits: logits[:, named] - logits[:, other])

    def panel(
        self, model: Model, example: TextExample, title: str, value: Callable[[Tensor], Tensor]
    ) -> WordPanel | None:
        """The contribution of each word to a value of the logits (B, K); None if the model does not allow it."""

        def read(rows: Tensor) -> Tensor:
            return value(self.forward(model, {"input_ids": rows}))

        ((rows, _),) = self.encode(model, [dataclasses.replace(example, label=None)])
        first, where = 0, ""
        if len(rows) > 1:
            with evaluating(model), torch.no_grad():
                said = [read(torch.tensor([ids], device=model.device)).item() for ids in rows]
            window, tokenizer = int(np.argmax(said)), model.tokenizer
            around = len(tokenizer.before) + len(tokenizer.after)
            first = self.reader.parts(tokenizer, len(tokenizer.encode(example.text).ids), around)[window].start
            rows, where = [rows[window]], f" in window {window + 1} of {len(said)}, which says most for it"
        shares = word_shares(model, example.text, rows[0], read, first)
        return None if shares is None else WordPanel(f"{title}; its words add {shares.total:+.2f}{where}", shares)

    def baselines(
        self,
        model: Model,
        training: Sequence[TextExample],
        validation: Sequence[TextExample],
        tested: Sequence[TextExample],
    ) -> list[Baseline]:
        known, judged = ([example.text for example in part] for part in (training, validation))
        outputs, strength = tfidf_regression(
            (known, self.truth(training)), (judged, self.truth(validation)), [example.text for example in tested]
        )
        return [Baseline(f"TF-IDF with logistic regression (C = {strength:g})", list(outputs))]


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text, got {value!r:.40}")
    return value
