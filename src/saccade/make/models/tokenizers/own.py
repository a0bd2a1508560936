"""The tokenizer of Saccade's own language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from .._shortened import shortened
from .byte_pairs import learn_byte_pairs

START = "<s>"
UNKNOWN = "<unk>"


@dataclasses.dataclass(frozen=True)
class Encoding:
    """The tokens of a text, and the characters they stand for.

    A byte-level token with part of a character spans the whole character.

    Args:
        ids: token ids.
        spans: (start, stop) of each token, which stands for the characters `text[start:stop]`.

    Example:
        >>> import saccade
        >>> saccade.models.load().tokenizer.encode("the cat").spans
        [(0, 3), (3, 5), (5, 7)]
    """

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenizer:
    """Saccade's own tokenizer: byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) or single characters.

    `encode` adds no special tokens: callers add the start token, which every training window begins with. Special
    tokens that are spelled out in a text are encoded as ordinary text.

    Raises:
        ValueError: a tokenizer without the start token.

    Example:
        >>> import saccade
        >>> tokenizer = saccade.models.load().tokenizer
        >>> tokenizer.encode("the cat").ids
        [1883, 277, 299]
        >>> tokenizer.decode([1883, 277, 299])
        'the cat'
    """

    def __init__(self, inner: tokenizers.Tokenizer):
        start = inner.token_to_id(START)
        if start is None:
            raise ValueError(f"tokenizer: has no start token {START!r}")
        inner.encode_special_tokens = True
        self._inner = inner
        self.start: int = start

    @property
    def vocabulary(self) -> int:
        """The number of tokens, special ones included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> Encoding:
        """The tokens of a text, without the start token."""
        encoded = self._inner.encode(text, add_special_tokens=False)
        return Encoding(ids=encoded.ids, spans=encoded.offsets)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, in parallel."""
        return [encoded.ids for encoded in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode piece by piece; a piece is returned as soon as its bytes form whole characters."""
        pending: list[int] = []
        for token in ids:
            pending.append(token)
            piece = self.decode(pending)
            # Four tokens contain at least one whole UTF-8 character, or bytes that are invalid.
            if not piece.endswith("\ufffd") or len(pending) >= 4:
                pending.clear()
                yield piece
        if pending:
            yield self.decode(pending)

    def to_json(self) -> str:
        """JSON for `from_json`, in the format of the `tokenizers` library."""
        return self._inner.to_str(pretty=True)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        """A tokenizer from the JSON of `to_json`. Raises ValueError if it is damaged."""
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer: {shortened(error)}") from None
        return cls(inner)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer file; FileNotFoundError without a file, ValueError if it is damaged."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def train_bpe(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train byte-level BPE with at most `vocabulary` tokens: the start token, 256 bytes, and merges."""
    if vocabulary < 257:
        raise ValueError(f"vocabulary: 256 bytes and the start token need at least 257, got {vocabulary}")
    return Tokenizer(learn_byte_pairs(texts, vocabulary, [START]))


def train_characters(texts: Sequence[str]) -> Tokenizer:
    """A tokenizer with a token for each character in `texts`, the start token, and one for all other characters."""
    characters = sorted(set().union(*texts))
    vocabulary = {token: i for i, token in enumerate([START, UNKNOWN, *characters])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([START, UNKNOWN])
    return Tokenizer(inner)
