"""Tasks of text: an encoder with word pieces of the user's own texts, or a checkpoint with the head of the task.

Shape legend: B texts of a batch, L tokens of the longest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ....operator.nn.stacks import LayerObserver
from ..._task_options import EncoderOptions, TextOptions
from ...models import Model, load
from ...models.loading import new_model
from ...models.output import ModelOutput
from ...models.text.decoder import TextDecoder
from ...models.tokenizers.sentencepiece import SentencePieceTokenizer
from ...models.tokenizers.text import TextTokenizer
from ...models.tokenizers.word_pieces import END, MASK, PAD, START, UNKNOWN, train_word_pieces
from .._example_task import Batch, ExampleTask
from .._temporary import kept_while_used, temporary_folder

LONGEST = 256  # tokens that a new encoder reads at once, where nothing else is asked for
AnyTokenizer = TextTokenizer | SentencePieceTokenizer


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

    def token_ids(self, model: Model, examples: Sequence[Any]) -> list[list[int]]:
        """The tokens of each text, the special ones included. ValueError for a long one if `long` is "refuse"."""
        return self.ids_of(model.tokenizer, [self.text_of(example) for example in examples], examples)

    def ids_of(self, tokenizer: AnyTokenizer, texts: list[str], examples: Sequence[Any]) -> list[list[int]]:
        """The tokens of texts that the examples have, by one of the model's tokenizers; errors as of `token_ids`."""
        if self.long == "refuse":
            limit = self.limit(tokenizer)
            for example, text in zip(examples, texts, strict=True):
                self.refuse_long(example.place, len(tokenizer.whole(text)), limit)
        return tokenizer.whole_many(texts, self.limit(tokenizer))

    def parts(self, tokenizer: AnyTokenizer, count: int, around: int) -> list[range]:
        """Which of a text's `count` tokens each row has, beside `around` others.

        Overlapping windows where there are more than are read; unless `long` is "slide" the first of them alone.
        """
        limit = self.limit(tokenizer)
        found = windows(count, count if limit is None else limit - around)
        return found if self.long == "slide" else found[:1]

    def limit(self, tokenizer: AnyTokenizer) -> int | None:
        """Tokens of a text that are read at once, the special ones included; None where nothing limits them."""
        limits = [limit for limit in (self.longest, tokenizer.longest) if limit is not None]
        return min(limits, default=None)

    def refuse_long(self, place: str, count: int, limit: int | None) -> None:
        """ValueError where a text has more tokens than are read, if `long` is "refuse"."""
        if self.long == "refuse" and limit is not None and count > limit:
            raise ValueError(
                f"{place}: {count} tokens are more than the {limit} that are read; cut the text, or give --long "
                f"{self.longs[0]}"
            )

    def padded(self, model: Model, rows: Sequence[list[int]]) -> Batch:
        """`input_ids` and `attention_mask` (B, L), padded on the right; the model computes no padding."""
        longest = max(map(len, rows))
        lengths = torch.tensor([len(row) for row in rows])
        pad = _pad(model)
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}

    def called(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> ModelOutput:
        """What the model gives for the tokens of a batch."""
        given = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
        output: ModelOutput = model(**given, **({} if observe is None else {"observe": observe}))
        return output


def _pad(model: Model) -> int:
    """The id that fills a batch. A decoder's classifier finds the last token by `pad_token_id`."""
    if isinstance(model, TextDecoder):
        named = model.settings.get("pad_token_id")
        if isinstance(named, int) and 0 <= named < model.vocabulary:
            return named
    return model.tokenizer.pad


@dataclasses.dataclass(frozen=True)
class EncoderTask(EncoderOptions, TextTask):
    """A task of texts whose new model is a BERT with word pieces of the training texts. Abstract.

    Args:
        cased: whether capitals and accents tell its words apart; a checkpoint's tokenizer has its own way.
    """

    @property
    def deviation(self) -> float:
        """Of a new encoder's matrices at the beginning; BERT's."""
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
    """Word pieces as the files that published models have."""
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


def windows(count: int, room: int) -> list[range]:
    """Parts of `count` tokens, each of at most `room`.

        room = 4:   0 1 2 3 4 5 6
                    -------
                        -------
                          -------

    A window begins half a window after the one before; the last one ends with the text.
    """
    if count <= room:
        return [range(count)]
    starts = [*range(0, count - room, max(room // 2, 1)), count - room]
    return [range(start, start + room) for start in starts]


def innermost(place: int, parts: Sequence[range], count: int) -> int:
    """The number of the window in which a token stands furthest from where the text is cut; of equal ones the first.

    The text's own beginning and end cut nothing.
    """

    def depth(part: range) -> float:
        before = place - part.start if part.start else math.inf
        after = part.stop - 1 - place if part.stop < count else math.inf
        return min(before, after) if place in part else -1.0

    return max(range(len(parts)), key=lambda n: depth(parts[n]))
