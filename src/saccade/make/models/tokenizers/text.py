"""Text to tokens and back, as the tokenizer of a published folder does it.

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

_PENDING = 4  # tokens hold at least one whole UTF-8 character, or bytes that never will be one


@dataclasses.dataclass(frozen=True)
class PairRow:
    """Two texts as a model reads them.

    Attributes:
        ids: of both, with the special tokens around them.
        types: the `token_type_ids`; None for models without them.
        second: the column of the second text's first token.
    """

    ids: list[int]
    types: list[int] | None
    second: int


class TextTokenizer:
    r"""A published tokenizer. It gives the ids that transformers' `AutoTokenizer` gives for the same folder.

    A special token that a text spells, such as "[MASK]", is that token.

    Attributes:
        before, after: ids that the model expects before and after a text.
        special: ids that stand for no text.
        named: role -> id, of "bos", "eos", "unk", "sep", "pad", "cls" and "mask" those that exist.
        pad: the id that fills a batch: the padding token, else the end of text, else 0. No model reads it.
        longest: tokens of one input, special ones included; None where nothing limits them.

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
        """How many tokens there are, special ones included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> Encoding:
        """The tokens of a text, without the special ones around it, however long it is."""
        encoded = self._inner.encode(_checked(text), add_special_tokens=False)
        return Encoding(ids=encoded.ids, spans=encoded.offsets)

    def whole(self, text: str) -> list[int]:
        """What the model reads for a text: its tokens between the special ones, however long it is."""
        return self._inner.encode(_checked(text)).ids

    def pair(self, first: Sequence[int], second: Sequence[int]) -> PairRow:
        """What the model reads for two texts, each as the ids that `encode` gives, however long they are."""
        (before, between, after), (one, other) = self._around_pair
        ids, types = [], []
        for part in (before, [(token, one) for token in first], between, [(token, other) for token in second], after):
            ids += [token for token, _ in part]
            types += [kind for _, kind in part]
        start = len(before) + len(first) + len(between)
        return PairRow(ids, types if self._files.types else None, start)

    @cached_property
    def _around_pair(self) -> tuple[list[list[tuple[int, int]]], tuple[int, int]]:
        """The special tokens before, between and after two texts, each with its type, and the types of the texts."""
        text = next(text for text in ("a", *self._inner.get_vocab(with_added_tokens=False)) if self.encode(text).ids)
        one, other = (self._inner.encode(text, add_special_tokens=False) for _ in range(2))
        count = len(one.ids)
        row = self._inner.post_process(one, other, True)
        tokens = list(zip(row.ids, row.type_ids, strict=True))
        first = row.special_tokens_mask.index(0)
        second = len(tokens) - row.special_tokens_mask[::-1].index(0) - count
        parts = [tokens[:first], tokens[first + count : second], tokens[second + count :]]
        return parts, (tokens[first][1], tokens[second][1])

    def whole_many(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        """`whole` of each text, in parallel, cut at `longest` tokens; None: the model's own limit."""
        limit = self._limit(longest, len(self.before) + len(self.after))
        found = [encoded.ids for encoded in self._inner.encode_batch([_checked(text) for text in texts])]
        return [ids if limit is None or len(ids) <= limit else self._cut(ids, limit) for ids in found]

    def __call__(
        self, texts: str | Sequence[str] | Sequence[tuple[str, str]], longest: int | None = None
    ) -> dict[str, Tensor]:
        """A padded batch: `input_ids` and `attention_mask`, int64 (B, L), and `token_type_ids` for models with them.

        Args:
            texts: one, several, or pairs. Of a pair that is too long the longer text loses tokens first.
            longest: tokens of one input, special ones included; longer texts are cut. None: the model's own limit.

        Raises:
            TypeError: no texts. ValueError: none, or no room beside the special tokens.
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
        """The text; special tokens stand for nothing."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """The text piece by piece; a piece appears once its bytes form whole characters.

        The pieces together are `decode`'s text, but for spaces that BERT's tokenizer takes away around signs.
        """
        seen: list[int] = []
        start = told = 0  # the tokens from `start` on are decoded again, since a word's space depends on the one before
        for token in ids:
            seen.append(token)
            before, now = self.decode(seen[start:told]), self.decode(seen[start:])
            if len(now) > len(before) and (not now.endswith("\ufffd") or len(seen) - told >= _PENDING):
                start, told = told, len(seen)
                yield now[len(before) :]
        if rest := self.decode(seen[start:])[len(self.decode(seen[start:told])) :]:
            yield rest

    def written(self, token: int) -> str:
        """How the vocabulary writes a token: `[SEP]`, `##ing`. ValueError for an id outside it."""
        written = self._inner.id_to_token(int(token)) if token >= 0 else None
        if written is None:
            raise ValueError(f"token: expected an id from 0 to {self.vocabulary - 1}, got {token}")
        return written

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens around a text, from one that has tokens."""
        for text in ("a", *self._inner.get_vocab(with_added_tokens=False)):
            inside = self._inner.encode(text, add_special_tokens=False).ids
            if inside:
                found = self._inner.encode(text)
                first = found.special_tokens_mask.index(0)
                return tuple(found.ids[:first]), tuple(found.ids[first + len(inside) :])
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
        for one, other in zip(encoded[::2], encoded[1::2], strict=True):
            if limit is not None:
                self._shorten(one, other, limit - self._inner.num_special_tokens_to_add(True))
            row = self._inner.post_process(one, other, True)
            rows.append((row.ids, row.type_ids))
        return rows

    def _shorten(self, value: Any, other: Any, room: int) -> None:
        """Cut a pair to `room` tokens, the longer one first."""
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
        longest: tokens the model reads at once, if it has a limit.

    Raises:
        FileNotFoundError: no file of a tokenizer. ValueError: a damaged file, or a tokenizer of another kind.
    """
    folder = Path(folder)
    pieces = [name for name in PIECES if (folder / name).is_file()]
    if pieces and not any((folder / name).is_file() for name in (FILE, WORDS)):
        raise ValueError(f"{folder}: {pieces[0]} is a SentencePiece model, which is not read here; expected {FILE}")
    return TextTokenizer(read_tokenizer_files(folder), longest)


def _checked(text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"texts: expected text, got {type(text).__name__}")
    return text
