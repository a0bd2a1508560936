"""What the decoder of an encoder-decoder reads: a target that is given, or one that the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..models.text.encoder_decoder import EncoderDecoder, NextTokenHead
from ._words import Word, group, split_words


class Target(NamedTuple):
    """The tokens that the decoder reads, its start token first, and the words that they make up.

    Of a target that the model wrote and that has other tokens when it is read again, each token is a word.
    """

    text: str
    ids: list[int]
    labels: tuple[str, ...]
    words: list[Word]
    written: bool  # by the model


def read_target(model: EncoderDecoder, text: str | None, source: Tensor) -> Target:
    """The target of ``source`` (1, L); None is what the model writes, as its files want it.

    Raises:
        ValueError: a model that names no start token or writes nothing, a target without a word or one too long.
    """
    if model.start is None:
        raise ValueError("model: its config.json has no decoder_start_token_id, with which targets begin")
    if text is not None:
        return _given(model, text)
    if not isinstance(model.head, NextTokenHead):
        raise ValueError("target: needed, since this model has no head that writes one")
    tokenizer = target_tokenizer(model)
    ids = [model.start, *model.generate(source).texts()[0][0]]
    ids = ids if model.longest is None else ids[: model.longest]  # the last token need not be read to be written
    text = tokenizer.decode(ids)
    again = tokenizer.encode(text)
    plain = [i for i, token in enumerate(ids) if token not in tokenizer.special and i] or [0]
    first, end = plain[0], plain[-1] + 1
    if list(again.ids) == ids[first:end] and split_words(text):
        return _worded(tokenizer, text, again.spans, ids, ids[:first], ids[end:], written=True)
    labels = tuple(Word(tokenizer.written(token), 0, 0, i, i + 1).label for i, token in enumerate(ids))
    words = [Word(label, 0, 0, i, i + 1, i < first or i >= end) for i, label in enumerate(labels)]
    return Target(text, ids, labels, words, True)


def target_tokenizer(model: EncoderDecoder) -> Any:
    """The tokenizer of targets, which may have pieces of their own."""
    return getattr(model.tokenizer, "targets", model.tokenizer)


def _given(model: EncoderDecoder, text: str) -> Target:
    tokenizer = target_tokenizer(model)
    spans = split_words(text)
    if not spans:
        raise ValueError("target: it holds no word; one word at least is needed")
    found = tokenizer.encode(text[: spans[-1][1]])
    assert model.start is not None
    before = [model.start, *tokenizer.before]
    ids = [*before, *found.ids, *tokenizer.after]
    if model.longest is not None and len(ids) > model.longest:
        raise ValueError(f"target: {len(ids):,} tokens came with the special ones; the decoder reads {model.longest:,}")
    return _worded(tokenizer, text, found.spans, ids, before, tokenizer.after, written=False)


def _worded(
    tokenizer: Any,
    text: str,
    spans: Sequence[tuple[int, int]],
    ids: list[int],
    before: Sequence[int],
    after: Sequence[int],
    *,
    written: bool,
) -> Target:
    first, last = ([tokenizer.written(token) for token in around] for around in (before, after))
    words = group(text, spans, before=first, after=last)
    return Target(text, ids, token_labels(text, spans, words, len(first)), words, written)


def token_labels(text: str, spans: Sequence[tuple[int, int]], words: Sequence[Word], before: int) -> tuple[str, ...]:
    """Each token that is read, as it can be shown: a word of one token as the word.

    ``spans`` are the characters of the tokens behind the first ``before``.
    """
    out = [""] * words[-1].last
    for word in words:
        for i in range(word.first, word.last):
            if word.last - word.first == 1 or not 0 <= i - before < len(spans):
                out[i] = word.label
                continue
            start, stop = spans[i - before]
            out[i] = Word(text[start:stop].strip(" ") or "␣", start, stop, i, i + 1).label
    return tuple(out)
