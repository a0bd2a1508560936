"""The target that the decoder of an encoder-decoder reads: given, or written by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...make.models.text.encoder_decoder import EncoderDecoder, NextTokenHead
from ._words import Word, group, split_words


class Target(NamedTuple):
    """The tokens that the decoder reads, its start token first, and their words.

    `read_target` returns it. If the tokenizer would encode the text of a written target as other tokens, each token is
    a word, and the text is that of the tokens.
    """

    text: str
    ids: list[int]
    pieces: tuple[str, ...]  # the text of each token
    words: list[Word]
    written: bool  # by the model

    @property
    def labels(self) -> tuple[str, ...]:
        return token_labels(self.words, self.pieces)

    @property
    def names(self) -> tuple[str, ...]:
        return token_names(self.words, self.pieces)


def read_target(model: EncoderDecoder, target: str | int | None, source: Tensor) -> Target:
    """The target for ``source``: the given text, or the text that the model writes.

    Args:
        target: a text; or the largest number of tokens that the model writes; or None, for the number in its files.
        source: (1, L) token ids.

    Raises:
        ValueError: a model without a start token or whose target is empty, a target without a word or too long.
    """
    if model.start is None:
        raise ValueError("model: its config.json has no decoder_start_token_id, with which targets begin")
    if isinstance(target, str):
        return _given(model, target)
    if not isinstance(model.head, NextTokenHead):
        raise ValueError("target: needed, since this checkpoint has no head that writes one")
    if target is not None and model.longest is not None and target > model.longest:
        raise ValueError(f"generate: expected at most {model.longest:,} tokens for this model, got {target:,}")
    more: dict[str, Any] = {} if target is None else {"max_new_tokens": target}
    ids = [model.start, *model.generate(source, **more).texts()[0][0]]
    return _written(model, ids if model.longest is None else ids[: model.longest])


def target_tokenizer(model: EncoderDecoder) -> Any:
    """The tokenizer of targets, which may differ from that of sources."""
    return getattr(model.tokenizer, "targets", model.tokenizer)


def _given(model: EncoderDecoder, text: str) -> Target:
    tokenizer = target_tokenizer(model)
    spans = split_words(text)
    if not spans:
        raise ValueError(f"target: expected at least one word, got {text!r:.40}")
    encoding = tokenizer.encode(text[: spans[-1][1]])
    assert model.start is not None
    before = [model.start, *tokenizer.before]
    ids = [*before, *encoding.ids, *tokenizer.after]
    if model.longest is not None and len(ids) > model.longest:
        raise ValueError(f"target: expected at most {model.longest:,} tokens with special ones, got {len(ids):,}")
    return _worded(tokenizer, text, encoding.spans, ids, before, tokenizer.after, written=False)


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
    """The label of each token: its word, or for a word of several tokens the token's own text from ``pieces``."""
    out = []
    for word in words:
        if word.last - word.first == 1:
            out.append(word.label)
        else:
            out += [Word(piece.strip(" ") or "␣", 0, 0, 0, 1).label for piece in pieces[word.first : word.last]]
    return tuple(out)


def token_names(words: Sequence[Word], pieces: Sequence[str]) -> tuple[str, ...]:
    """Names of the tokens for sentences: the word in quotes if it is a single token, otherwise the token and its word.

    Example:
        >>> from saccade.inspection import Word, token_names
        >>> words = [Word("an", 0, 2, 0, 1), Word("owlet", 3, 8, 1, 3)]
        >>> token_names(words, ["an", " owl", "et"])
        ("'an'", "'owl' in 'owlet'", "'et' in 'owlet'")
    """
    whole = [""] * len(pieces)
    for word in words:
        if word.last - word.first > 1:
            whole[word.first : word.last] = [f" in '{word.label}'"] * (word.last - word.first)
    return tuple(f"'{label}'{of}" for label, of in zip(token_labels(words, pieces), whole, strict=True))
