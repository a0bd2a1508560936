"""Published text tokenizers.

Shape legend: B texts, L tokens of the longest, special ones included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.tokenizer_files import FILE, PIECES, WORDS, TokenizerFiles, read_tokenizer_files
from .own import Encoding

_PENDING = 4  # tokens contain at least one whole UTF-8 character, or invalid bytes


@dataclasses.dataclass(frozen=True)
class PairRow:
    """Two texts as one model input.

    Attributes:
        ids: of both texts, with special tokens.
        types: the `token_type_ids`; None for models without them.
        second: the column of the second text's first token.
    """

    ids: list[int]
    types: list[int] | None
    second: int


class TextTokenizer:
    r"""A published tokenizer. Gives the same ids as transformers' `AutoTokenizer` for the same folder.

    Special tokens spelled in a text, such as "[MASK]", are recognised.

    Attributes:
        before, after: special tokens before and after a text.
        special: ids of all special tokens.
        named: ids by role: "bos", "eos", "unk", "sep", "pad", "cls" and "mask", as far as defined.
        pad: the id of padding: the padding token, else the end of text, else 0. Models ignore it.
        longest: maximum number of tokens of an input, special ones included; None if unlimited.

    Example:
        >>> import tempfile, transformers, saccade
        >>> sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> with tempfile.TemporaryDirectory() as folder:  # as a published model's folder
        ...     transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
        ...     with open(folder + "/vocab.txt", "w") as file:
        ...         print("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", sep="\n", file=file)
        ...     tokenizer = saccade.models.load(folder).tokenizer
        >>> tokenizer(["a cat", "dog"])["input_ids"]
        tensor([[2, 5, 6, 3],
                [2, 7, 3, 0]])
    """

    def __init__(self, files: TokenizerFiles, longest: int | None = None):
        limits = [limit for limit in (files.longest, longest) if limit is not None]
        self._inner, self._files = files.inner, files
        self.longest = min(limits) if limits else None
        self.special, self.named = files.special, files.named
        self.pad: int = files.named.get("pad", files.named.get("eos", 0))
        self.before, self.after = self._around()

    @property
    def vocabulary(self) -> int:
        """The number of tokens, special ones included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> Encoding:
        """The tokens of a text, without special ones and without truncation."""
        encoded = self._inner.encode(_checked(text), add_special_tokens=False)
        return Encoding(ids=encoded.ids, spans=encoded.offsets)

    def whole(self, text: str) -> list[int]:
        """The ids of a text with special tokens, without truncation."""
        return self._inner.encode(_checked(text)).ids

    def pair(self, first: Sequence[int], second: Sequence[int]) -> PairRow:
        """The ids of two texts with special tokens, from the ids of `encode`, without truncation."""
        (before, between, after), (first_type, second_type) = self._around_pair
        ids, types = [], []
        for part in (
            before,
            [(token, first_type) for token in first],
            between,
            [(token, second_type) for token in second],
            after,
        ):
            ids += [token for token, _ in part]
            types += [kind for _, kind in part]
        start = len(before) + len(first) + len(between)
        return PairRow(ids, types if self._files.types else None, start)

    @cached_property
    def _around_pair(self) -> tuple[list[list[tuple[int, int]]], tuple[int, int]]:
        """The special tokens before, between and after two texts, each with its type, and the types of the texts."""
        text = next(text for text in ("a", *self._inner.get_vocab(with_added_tokens=False)) if self.encode(text).ids)
        encoded = [self._inner.encode(text, add_special_tokens=False) for _ in range(2)]
        count = len(encoded[0].ids)
        row = self._inner.post_process(encoded[0], encoded[1], True)
        tokens = list(zip(row.ids, row.type_ids, strict=True))
        first = row.special_tokens_mask.index(0)
        second = len(tokens) - row.special_tokens_mask[::-1].index(0) - count
        parts = [tokens[:first], tokens[first + count : second], tokens[second + count :]]
        return parts, (tokens[first][1], tokens[second][1])

    def whole_many(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        """`whole` for each text, in parallel, truncated to `longest` tokens; if None, to the model's limit."""
        limit = self._limit(longest, len(self.before) + len(self.after))
        rows = [encoded.ids for encoded in self._inner.encode_batch([_checked(text) for text in texts])]
        return [ids if limit is None or len(ids) <= limit else self._cut(ids, limit) for ids in rows]

    def __call__(
        self, texts: str | Sequence[str] | Sequence[tuple[str, str]], longest: int | None = None
    ) -> dict[str, Tensor]:
        """A padded batch: `input_ids` and `attention_mask`, int64 (B, L), and `token_type_ids` for models with them.

        Args:
            texts: one, several, or pairs. Pairs that are too long are truncated from the longer text first.
            longest: maximum number of tokens, special ones included; longer texts are truncated. None: the model's
                limit.

        Raises:
            TypeError: not texts. ValueError: no texts, or no room besides the special tokens.
        """
        rows = self._rows([texts] if isinstance(texts, str) else list(texts), longest)
        length = max(len(ids) for ids, _ in rows)
        spaces = [length - len(ids) for ids, _ in rows]
        batch = {
            "input_ids": self._padded([ids for ids, _ in rows], spaces, self.pad),
            "attention_mask": self._padded([[1] * len(ids) for ids, _ in rows], spaces, 0),
        }
        if self._files.types:
            batch["token_type_ids"] = self._padded([types for _, types in rows], spaces, 0)
        return batch

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The text of token ids, without special tokens."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Decode piece by piece; a piece is returned as soon as its bytes form whole characters.

        The joined pieces equal `decode`'s text, except for spaces that BERT's tokenizer removes around punctuation.
        """
        tokens: list[int] = []
        start = emitted = 0  # tokens from `start` on are decoded again: a word's space depends on the previous one
        for token in ids:
            tokens.append(token)
            before, now = self.decode(tokens[start:emitted]), self.decode(tokens[start:])
            if len(now) > len(before) and (not now.endswith("\ufffd") or len(tokens) - emitted >= _PENDING):
                start, emitted = emitted, len(tokens)
                yield now[len(before) :]
        if rest := self.decode(tokens[start:])[len(self.decode(tokens[start:emitted])) :]:
            yield rest

    def written(self, token: int) -> str:
        """The vocabulary entry of a token, such as `[SEP]` or `##ing`. ValueError for an id outside the vocabulary."""
        written = self._inner.id_to_token(int(token)) if token >= 0 else None
        if written is None:
            raise ValueError(f"token: expected an id from 0 to {self.vocabulary - 1}, got {token}")
        return written

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens around a text, found by encoding one."""
        for text in ("a", *self._inner.get_vocab(with_added_tokens=False)):
            inside = self._inner.encode(text, add_special_tokens=False).ids
            if inside:
                encoded = self._inner.encode(text)
                first = encoded.special_tokens_mask.index(0)
                return tuple(encoded.ids[:first]), tuple(encoded.ids[first + len(inside) :])
        return (), ()

    def _limit(self, longest: int | None, special: int) -> int | None:
        limit = self.longest if longest is None else longest
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= special):
            raise ValueError(f"longest: expected an int above {special}, the special tokens, got {limit!r}")
        return limit

    def _cut(self, ids: list[int], limit: int) -> list[int]:
        first, last = len(self.before), len(self.after)
        inside, room = ids[first : len(ids) - last], limit - first - last
        kept = inside[-room:] if self._files.left_cut else inside[:room]
        return [*self.before, *kept, *self.after]

    def _rows(self, texts: list[Any], longest: int | None) -> list[tuple[list[int], list[int]]]:
        """The ids and types of each text or pair."""
        if not texts:
            raise ValueError("texts: empty, expected at least one text")
        paired = not isinstance(texts[0], str)
        if not paired:
            return [(ids, [0] * len(ids)) for ids in self.whole_many(texts, longest)]
        for pair in texts:
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                raise TypeError(f"texts: expected texts, or pairs of two texts, got {pair!r:.80}")
        both = [_checked(text) for pair in texts for text in pair]
        encoded = self._inner.encode_batch(both, add_special_tokens=False)
        limit = self._limit(longest, self._inner.num_special_tokens_to_add(True))
        rows = []
        for first, second in zip(encoded[::2], encoded[1::2], strict=True):
            if limit is not None:
                self._shorten(first, second, limit - self._inner.num_special_tokens_to_add(True))
            row = self._inner.post_process(first, second, True)
            rows.append((row.ids, row.type_ids))
        return rows

    def _shorten(self, value: Any, other: Any, room: int) -> None:
        """Truncate a pair to `room` tokens, the longer text first."""
        short, long = sorted((value, other), key=lambda encoded: len(encoded.ids))
        if len(short.ids) + len(long.ids) <= room:
            return
        kept = min(len(short.ids), room // 2)
        direction = "left" if self._files.left_cut else "right"
        short.truncate(kept, direction=direction)
        long.truncate(room - kept, direction=direction)

    def _padded(self, rows: list[list[int]], spaces: list[int], fill: int) -> Tensor:
        if self._files.left_padding:
            return torch.tensor([[fill] * n + row for row, n in zip(rows, spaces, strict=True)], dtype=torch.int64)
        return torch.tensor([row + [fill] * n for row, n in zip(rows, spaces, strict=True)], dtype=torch.int64)


def open_tokenizer(folder: str | Path, longest: int | None = None) -> TextTokenizer:
    """The tokenizer of a published folder.

    Args:
        longest: the model's maximum number of tokens, if it has one.

    Raises:
        FileNotFoundError: no tokenizer file. ValueError: a damaged file, or an unsupported tokenizer.
    """
    folder = Path(folder)
    pieces = [name for name in PIECES if (folder / name).is_file()]
    if pieces and not any((folder / name).is_file() for name in (FILE, WORDS)):
        raise ValueError(f"{folder}: {pieces[0]}: SentencePiece is not supported for this family; expected {FILE}")
    return TextTokenizer(read_tokenizer_files(folder), longest)


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"texts: expected text, got {type(text).__name__}")
    return text
