"""What the decoder of an encoder-decoder reads: a target that is given, or one that the model writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..models.text.encoder_decoder import EncoderDecoder, NextTokenHead
from ._words import Word, group, split_words


class Target(NamedTuple):
    """The tokens that the decoder reads, its start token first, and the words that they make up.

    Of a target that the model wrote and that has other tokens when it is read again, each token is a word, and the
    text is the tokens as they are written.
    """

    text: str
    ids: list[int]
    pieces: tuple[str, ...]  # the tokens as they are written
    words: list[Word]
    written: bool  # by the model

    @property
    def labels(self) -> tuple[str, ...]:
        return token_labels(self.words, self.pieces)

    @property
    def names(self) -> tuple[str, ...]:
        return token_names(self.words, self.pieces)


def read_target(model: EncoderDecoder, target: str | int | None, source: Tensor) -> Target:
    """The target of ``source`` (1, L): the text that is given, or what the model writes.

    A number is how many tokens it writes at most; None: as its files want it.

    Raises:
        ValueError: a model that names no start token or writes nothing, a target without a word or one too long.
    """
    if model.start is None:
        raise ValueError("model: its config.json has no decoder_start_token_id, with which targets begin")
    if isinstance(target, str):
        return _given(model, target)
    if not isinstance(model.head, NextTokenHead):
        raise ValueError("target: needed, since this checkpoint has no head that writes one")
    if target is not None and model.longest is not None and target > model.longest:
        raise ValueError(f"generate: {target:,} tokens, and {model.longest:,} at most is what this model writes")
    more: dict[str, Any] = {} if target is None else {"max_new_tokens": target}
    ids = [model.start, *model.generate(source, **more).texts()[0][0]]
    return _written(model, ids if model.longest is None else ids[: model.longest])


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


def _written(model: EncoderDecoder, ids: list[int]) -> Target:
    tokenizer = target_tokenizer(model)
    text = tokenizer.decode(ids)
    again = tokenizer.encode(text)
    plain = [i for i, token in enumerate(ids) if token not in tokenizer.special and i] or [0]
    first, end = plain[0], plain[-1] + 1
    if list(again.ids) == ids[first:end] and split_words(text):
        return _worded(tokenizer, text, again.spans, ids, ids[:first], ids[end:], written=True)
    pieces = tuple(tokenizer.written(token) for token in ids)
    words, at = [], 0
    for i, piece in enumerate(pieces):
        words.append(Word(piece, at, at + len(piece), i, i + 1, i < first or i >= end))
        at += len(piece)
    return Target("".join(pieces), ids, pieces, words, True)


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
    return Target(text, ids, (*first, *(text[start:stop] for start, stop in spans), *last), words, written)


def token_labels(words: Sequence[Word], pieces: Sequence[str]) -> tuple[str, ...]:
    """Each token that is read, as it can be shown: a word of one token as the word, others as their ``pieces``."""
    out = []
    for word in words:
        if word.last - word.first == 1:
            out.append(word.label)
        else:
            out += [Word(piece.strip(" ") or "␣", 0, 0, 0, 1).label for piece in pieces[word.first : word.last]]
    return tuple(out)


def token_names(words: Sequence[Word], pieces: Sequence[str]) -> tuple[str, ...]:
    """What sentences call each token: 'owl', and of a word of several tokens 'o' in 'owl'."""
    whole = [""] * len(pieces)
    for word in words:
        if word.last - word.first > 1:
            whole[word.first : word.last] = [f" in '{word.label}'"] * (word.last - word.first)
    return tuple(f"'{label}'{of}" for label, of in zip(token_labels(words, pieces), whole, strict=True))
