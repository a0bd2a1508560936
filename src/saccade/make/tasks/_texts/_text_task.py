"""Tasks of text: an encoder with word pieces of the user's own texts, or a checkpoint with the head of the task.

Shape legend: B texts of a batch, L tokens of the longest.
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..._task_options import EncoderOptions, TextOptions
from ...models import Model, load
from ...models.loading import new_model
from ...models.tokenizers.word_pieces import END, MASK, PAD, START, UNKNOWN, train_word_pieces
from .._example_task import ExampleTask
from .._temporary import kept_while_used, temporary_folder
from ._reader import TextReader

LONGEST = 256  # tokens that a new encoder reads at once, where nothing else is asked for


@dataclasses.dataclass(frozen=True)
class TextTask(TextOptions, ExampleTask):
    """A task whose examples are texts. Abstract.

    Args:
        vocabulary: word pieces of a new encoder, at most.
        layers, heads, width, dropout: of a new encoder; a checkpoint has its own.
        longest: tokens of a text that are read, the special ones included; None: 256 by a new encoder, all that a
            checkpoint can.
        long: "cut" texts that are longer, or "refuse" them; what else a task knows.

    Example:
        >>> import saccade
        >>> task = saccade.tasks.Tag(layers=3)
        >>> isinstance(task, saccade.tasks.TextTask), task.long
        (True, 'slide')
    """

    head: ClassVar[str]
    longs: ClassVar[tuple[str, ...]] = ("cut", "refuse")  # what may be done with long texts, the usual one first

    def __post_init__(self) -> None:
        if self.long not in self.longs:
            raise ValueError(f"long: expected one of {', '.join(map(repr, self.longs))}, got {self.long!r}")
        for name, least in (("vocabulary", 1), ("layers", 1), ("heads", 1), ("width", 1), ("longest", 3)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: must be at least {least}, got {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout: must be in [0, 1), got {self.dropout}")
        if self.width % self.heads:
            raise ValueError(f"heads: must divide the width, got heads={self.heads} and width={self.width}")

    @abstractmethod
    def text_of(self, example: Any) -> str:
        """The text of an example."""

    def open_model(self, source: Path | str) -> Model:
        return load(source, head=self.head, labels=list(self.label_names) or None, dtype=torch.float32)

    @property
    def reader(self) -> TextReader:
        """Cuts texts into tokens."""
        return TextReader(self.longest, self.long, self.longs[0])


@dataclasses.dataclass(frozen=True)
class EncoderTask(EncoderOptions, TextTask):
    """A task of texts whose new model is a BERT with word pieces of the training texts. Abstract.

    Args:
        cased: whether capitals and accents tell its words apart; a checkpoint's tokenizer has its own way.
    """

    @property
    def deviation(self) -> float:
        """The standard deviation of a new encoder's initial matrices; BERT's."""
        return 0.02

    def new_model(self, training: Sequence[Any]) -> Model:
        folder = temporary_folder()
        longest = self.longest or LONGEST
        pieces = train_word_pieces([self.text_of(example) for example in training], self.vocabulary, cased=self.cased)
        write_tokenizer(folder, pieces.to_str(pretty=True), longest, cased=self.cased)
        model = new_model(
            folder,
            head=self.head,
            labels=self.label_names or None,
            model_type="bert",
            vocab_size=pieces.get_vocab_size(),
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=longest,
            initializer_range=self.deviation,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )
        return kept_while_used(model, folder)


def write_tokenizer(folder: Path, content: str, longest: int, *, cased: bool) -> None:
    """Write a word-piece tokenizer as the files of published models."""
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": not cased,
        "model_max_length": longest,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "cls_token": START,
        "sep_token": END,
        "mask_token": MASK,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
