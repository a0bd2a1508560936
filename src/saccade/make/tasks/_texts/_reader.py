"""How texts become rows of tokens, and the model's output for these rows.

Shape legend: B rows of a batch, L tokens of the longest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from ....operator.nn.stacks import LayerObserver
from ...models import Model
from ...models.output import ModelOutput
from ...models.text.decoder import TextDecoder
from ...models.tokenizers.sentencepiece import SentencePieceTokenizer
from ...models.tokenizers.text import TextTokenizer
from .._example_task import Batch

AnyTokenizer = TextTokenizer | SentencePieceTokenizer


@dataclasses.dataclass(frozen=True)
class TextReader:
    """Cuts texts into tokens.

    Args:
        longest: tokens of a text that are read, the special ones included; None: all that the model can.
        long: "cut" longer texts, "slide" windows over them, or "refuse" them.
        advice: the value of `long` that an error recommends.
    """

    longest: int | None
    long: str
    advice: str

    def token_ids(self, tokenizer: AnyTokenizer, texts: list[str], places: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, the special ones included. ValueError for a long one if `long` is "refuse"."""
        if self.long == "refuse":
            for place, text in zip(places, texts, strict=True):
                self.refuse_long(tokenizer, place, len(tokenizer.whole(text)))
        return tokenizer.whole_many(texts, self.limit(tokenizer))

    def limit(self, tokenizer: AnyTokenizer) -> int | None:
        """Tokens of a text that are read at once, the special ones included; None if nothing limits them."""
        limits = [limit for limit in (self.longest, tokenizer.longest) if limit is not None]
        return min(limits, default=None)

    def parts(self, tokenizer: AnyTokenizer, count: int, around: int) -> list[range]:
        """The parts of a text of `count` tokens, one for each row, which also has `around` other tokens.

        A text that is too long for one row becomes overlapping windows; unless `long` is "slide", only the first.
        """
        limit = self.limit(tokenizer)
        parts = windows(count, count if limit is None else limit - around)
        return parts if self.long == "slide" else parts[:1]

    def refuse_long(self, tokenizer: AnyTokenizer, place: str, count: int) -> None:
        """ValueError if a text has more tokens than are read, if `long` is "refuse"."""
        limit = self.limit(tokenizer)
        if self.long == "refuse" and limit is not None and count > limit:
            raise ValueError(
                f"{place}: {count} tokens are more than the {limit} that are read; cut the text, or give --long "
                f"{self.advice}"
            )


def padded(model: Model, rows: Sequence[list[int]]) -> Batch:
    """`input_ids` and `attention_mask` (B, L), padded on the right; the model computes no padding."""
    longest = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    pad = _pad(model)
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def text_output(model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> ModelOutput:
    """The model's output for the tokens of a batch."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch}
    output: ModelOutput = model(**inputs, **({} if observe is None else {"observe": observe}))
    return output


def _pad(model: Model) -> int:
    """The id that fills a batch. A decoder's classifier finds the last token by `pad_token_id`."""
    if isinstance(model, TextDecoder):
        named = model.settings.get("pad_token_id")
        if isinstance(named, int) and 0 <= named < model.vocabulary:
            return named
    return model.tokenizer.pad


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
    """The number of the window in which a token is furthest from a cut; the first in a tie. The beginning and the end
    of the text are not cuts."""

    def depth(part: range) -> float:
        before = place - part.start if part.start else math.inf
        after = part.stop - 1 - place if part.stop < count else math.inf
        return min(before, after) if place in part else -1.0

    return max(range(len(parts)), key=lambda n: depth(parts[n]))
