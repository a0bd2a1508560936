"""`tag`: entities in texts. An encoder with a linear head on the first piece of each word.

Shape legend: B rows of a batch, L tokens of the longest, K tags, W words of a text.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from .._task_registry import TagOptions
from ..models import Model
from ..models.output_heads import IGNORED
from ._classes._results import by_class, keeping_kinds, label_table
from ._example_task import Batch, parted, widened
from ._task import Baseline, Details, Tested
from ._texts._entities import OUTSIDE, completed, entities_of, parsed, scheme_of, tags_of
from ._texts._reader import innermost, padded, text_output
from ._texts._tagged import SPLITTERS, TaggedText, read_columns, read_plain, read_spans, split_text
from ._texts._tagged_picture import ComparedText, tagged_picture
from ._texts._text_task import EncoderTask

NO_WORD = -1  # in a row of a batch: a token that speaks for no word


@dataclasses.dataclass(frozen=True)
class TaggedWords:
    """The predictions for the words of a text.

    Args:
        tags: of each word.
        probabilities: of these tags; None of a word that was cut off.
    """

    tags: list[str]
    probabilities: list[float | None]


@dataclasses.dataclass(frozen=True)
class WordRow:
    """A text, or a window of it, as a row of a batch.

    Args:
        ids: its tokens, the special ones included.
        places: the columns of the tokens that speak for words.
        words: the numbers of these words.
        labels: the numbers of their tags; None if unknown.
    """

    ids: list[int]
    places: list[int]
    words: list[int]
    labels: list[int] | None


@dataclasses.dataclass(frozen=True)
class WordItem:
    """A text as rows of a batch; `words` is how many it has."""

    words: int
    rows: list[WordRow]


@dataclasses.dataclass(frozen=True)
class Tag(TagOptions, EncoderTask):
    r"""Entities in texts, and other tags of words by BIO or IOBES.

    The first piece of each word predicts its tag; the loss ignores the others. Each kind keeps at least one sentence to
    learn from. `predict` returns `entities` (characters `start` to `end`), `words`, `tags` and their `probabilities`.

    Args:
        column: of a file with columns: the one that holds the tag, counted from 1; None is the last.
        words: how texts that are not yet split become words: by "signs" (spaces, and every punctuation mark is a word)
            or only by "spaces".
        long: "slide": overlapping windows over texts that are too long; each word is judged in the window in which it
            is furthest from an edge; "cut": words behind the limit are not judged; "refuse": an error.
        cased: as in every task of texts; names are capitals in many languages.
        tags: in the order of the model's logits; learned from the training data.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "names.conll")
        ...     _ = path.write_text("Ada B-PER\nmet O\nBob B-PER\n")
        ...     [text] = saccade.tasks.Tag().read(path)
        >>> text.text, text.tags
        ('Ada met Bob', ('B-PER', 'O', 'B-PER'))
    """

    tags: tuple[str, ...] = ()

    head = "token-classification"
    longs = ("slide", "cut", "refuse")
    learned = ("tags",)
    requires = ("seqeval.metrics",)
    protocol = "entities as seqeval counts them by default: kind, first and last word have to be right"
    extra = "tag"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.words not in SPLITTERS:
            raise ValueError(f"words: expected one of {', '.join(map(repr, SPLITTERS))}, got {self.words!r}")
        if self.column is not None and self.column < 2:
            raise ValueError(f"column: must be at least 2, the first holds the words, got {self.column}")

    @property
    def label_names(self) -> Sequence[str]:
        return self.tags

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[TaggedText]:
        if path.suffix.lower() == ".jsonl":
            return read_spans(path, self.words, self.tags)
        return read_columns(path, self.column, self.tags)

    def split(self, data: Sequence[TaggedText], share: float, seed: int) -> tuple[list[TaggedText], list[TaggedText]]:
        """A random split in which training keeps a text with every kind of entity, and one that shows the scheme."""
        kinds = [{scheme_of(example.truth), *(parsed(tag)[1] for tag in example.truth)} for example in data]
        return parted(data, keeping_kinds(kinds, share, seed))

    def fitted(self, training: Sequence[TaggedText]) -> Tag:
        tags = {tag for example in training for tag in example.truth}
        if len(tags) < 2:
            raise ValueError(f"tags: expected entities to learn, every word is tagged {next(iter(tags))!r}")
        return dataclasses.replace(self, tags=completed(tags))

    def inputs(self, texts: Sequence[str]) -> list[TaggedText]:
        return [split_text(text, f"text {n}", self.words) for n, text in enumerate(texts, 1)]

    def read_inputs(self, path: Path) -> list[TaggedText]:
        return read_plain(path, self.words)

    def is_empty(self, example: TaggedText) -> bool:
        return not example.words

    def text_of(self, example: TaggedText) -> str:
        return example.text

    def encode(self, model: Model, examples: Sequence[TaggedText]) -> list[WordItem]:
        pieces = WordPieces(model)
        numbers = {tag: n for n, tag in enumerate(self.tags)}
        items = []
        for example in examples:
            labels = None if example.tags is None else [numbers[tag] for tag in example.tags]
            items.append(WordItem(len(example.words), self._rows(pieces, example, labels)))
        return items

    def _rows(self, pieces: WordPieces, example: TaggedText, labels: list[int] | None) -> list[WordRow]:
        """The windows of a text as rows; each word is in one of them, unless it is cut off."""
        tokenizer = pieces.tokenizer
        ids, firsts = pieces.of(example)
        special = len(tokenizer.before) + len(tokenizer.after)
        self.reader.refuse_long(tokenizer, example.place, len(ids) + special)
        parts = self.reader.parts(tokenizer, len(ids), special)
        words: list[list[int]] = [[] for _ in parts]
        for word, first in enumerate(firsts):
            part = innermost(first, parts, len(ids))
            if first in parts[part]:
                words[part].append(word)
        return [
            WordRow(
                [*tokenizer.before, *ids[part.start : part.stop], *tokenizer.after],
                [len(tokenizer.before) + firsts[word] - part.start for word in mine],
                mine,
                None if labels is None else [labels[word] for word in mine],
            )
            for part, mine in zip(parts, words, strict=True)
        ]

    def length(self, item: WordItem) -> int:
        return sum(len(row.ids) for row in item.rows)

    def rows(self, item: WordItem) -> int:
        return len(item.rows)

    def collate(self, model: Model, items: Sequence[WordItem], random: np.random.Generator | None = None) -> Batch:
        """The tokens; `words` (B, L), the number of the word that a token represents; `labels` (B, L); for each row
        `texts` (B,), the number of its text, and `counts` (B,), the number of that text's words."""
        rows = [row for item in items for row in item.rows]
        batch = padded(model, [row.ids for row in rows])
        shape = batch["input_ids"].shape
        words, labels = torch.full(shape, NO_WORD), torch.full(shape, IGNORED)
        for n, row in enumerate(rows):
            words[n, row.places] = torch.tensor(row.words)
            if row.labels is not None:
                labels[n, row.places] = torch.tensor(row.labels)
        known = {"labels": labels} if all(row.labels is not None for row in rows) else {}
        texts = torch.tensor([n for n, item in enumerate(items) for _ in item.rows])
        counts = torch.tensor([item.words for item in items for _ in item.rows])
        return {**batch, "words": words, "texts": texts, "counts": counts, **known}

    # --- loss ---------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Tensor:
        """The logits (B, L, K)."""
        logits = text_output(model, batch, observe).logits
        assert logits is not None
        return widened(logits)

    def loss(self, result: Tensor, batch: Batch, *, learning: bool) -> Tensor:
        labels = batch["labels"].flatten()
        total = F.cross_entropy(result.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
        return total / max(self.weight(batch, learning=learning), 1)  # part of a batch may have no word's first piece

    def weight(self, batch: Batch, *, learning: bool) -> float:
        return int((batch["labels"] != IGNORED).sum())

    def logits(self, result: Tensor, batch: Batch) -> list[Tensor]:
        return [result[batch["words"] != NO_WORD]]

    def outputs(self, model: nn.Module, result: Tensor, batch: Batch) -> list[TaggedWords]:
        probabilities, numbers = (found.cpu() for found in result.double().softmax(-1).max(-1))
        texts, counts = batch["texts"].tolist(), batch["counts"].tolist()
        sizes = dict(zip(texts, counts, strict=True))
        found = [TaggedWords([OUTSIDE] * sizes[n], [None] * sizes[n]) for n in range(len(sizes))]
        words = batch["words"].cpu()
        for row, column in (words != NO_WORD).nonzero().tolist():
            text, word = found[texts[row]], int(words[row, column])
            text.tags[word] = self.tags[int(numbers[row, column])]
            text.probabilities[word] = float(probabilities[row, column])
        return found

    # --- metric and picture -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[TaggedWords], data: Sequence[TaggedText]) -> dict[str, float]:
        from seqeval.metrics import accuracy_score
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

        truth, predicted = [example.truth for example in data], [output.tags for output in outputs]
        precision, recall, f1, _ = precision_recall_fscore_support(truth, predicted, average="micro", zero_division=0)
        return {
            "entity F1": float(f1),
            "precision": float(precision),
            "recall": float(recall),
            "word accuracy": float(accuracy_score(truth, predicted)),
        }

    def constant(self, model: Model, training: Sequence[TaggedText], tested: Sequence[TaggedText]) -> Baseline:
        counts = (len(example.words) for example in tested)
        return Baseline("naming no entity", [TaggedWords([OUTSIDE] * n, [None] * n) for n in counts])

    def baselines(
        self,
        model: Model,
        training: Sequence[TaggedText],
        validation: Sequence[TaggedText],
        tested: Sequence[TaggedText],
    ) -> list[Baseline]:
        usual = self._usual_tags(training)
        outputs = []
        for example in tested:
            known = [usual.get(example.word(n), (OUTSIDE, None)) for n in range(len(example.words))]
            outputs.append(TaggedWords([tag for tag, _ in known], [share for _, share in known]))
        return [Baseline("the most frequent tag of each word", outputs)]

    def _usual_tags(self, training: Sequence[TaggedText]) -> dict[str, tuple[str, float]]:
        """The most frequent tag of each word (in a tie, the first in `tags`), and its share."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for example in training:
            for n, tag in enumerate(example.truth):
                counts[example.word(n)][tag] += 1
        best = {word: max(self.tags, key=found.__getitem__) for word, found in counts.items()}
        return {word: (tag, counts[word][tag] / counts[word].total()) for word, tag in best.items()}

    def details(self, outputs: Sequence[TaggedWords], data: Sequence[TaggedText]) -> Details:
        """`types`: precision, recall, F1 and count of each kind of entity."""
        from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

        truth, predicted = [example.truth for example in data], [output.tags for output in outputs]
        kinds = sorted({entity.kind for tags in (*truth, *predicted) for entity in entities_of(tags)})
        rows = precision_recall_fscore_support(truth, predicted, average=None, zero_division=0)
        types = by_class(kinds, rows)
        return Details({"types": types}, label_table(types, "entity"))

    def picture(self, tested: Tested, kind: str) -> bytes:
        texts = []
        for example, output in zip(tested.data, tested.outputs, strict=True):
            words = [example.word(n) for n in range(len(example.words))]
            texts.append(ComparedText(words, entities_of(example.truth), entities_of(output.tags)))
        return tagged_picture(texts, kind)

    def shown(self, example: TaggedText, output: TaggedWords) -> dict[str, Any]:
        """The tags are those of the entities: sequences that the scheme does not allow are repaired."""
        entities = []
        for entity in entities_of(output.tags):
            start, end = example.words[entity.start][0], example.words[entity.stop - 1][1]
            entities.append({"text": example.text[start:end], "label": entity.kind, "start": start, "end": end})
        count = len(example.words)
        return {
            "text": example.text,
            "entities": entities,
            "words": [example.word(n) for n in range(count)],
            "tags": tags_of(entities_of(output.tags), count, scheme_of(self.tags)),
            "probabilities": output.probabilities,
        }

    def line(self, shown: Mapping[str, Any]) -> str:
        """The text with its entities in brackets."""
        text, parts, at = shown["text"], [], 0
        for entity in shown["entities"]:
            parts += [text[at : entity["start"]], f"[{entity['text']}]({entity['label']})"]
            at = entity["end"]
        return " ".join("".join([*parts, text[at:]]).split())


class WordPieces:
    """The tokens of words by a model's tokenizer, cached by word.

    Every word is split on its own, so no token belongs to two; one that the tokenizer has nothing for, such as a lone
    variation selector, is an unknown token.
    """

    def __init__(self, model: Model):
        self.model, self.tokenizer = model, model.tokenizer
        self._unknown = self.tokenizer.named.get("unk", self.tokenizer.pad)
        self._found: dict[str, list[int]] = {}

    def of(self, example: TaggedText) -> tuple[list[int], list[int]]:
        """The tokens of a text, and the number of each word's first one."""
        ids: list[int] = []
        firsts = []
        for start, stop in example.words:
            spaced = start - 1 if start and example.text[start - 1].isspace() else start
            firsts.append(len(ids))
            ids += self._pieces(example.text[spaced:stop])
        return ids, firsts

    def _pieces(self, word: str) -> list[int]:
        if word not in self._found:
            self._found[word] = self.tokenizer.encode(word).ids or [self._unknown]
        return self._found[word]
