"""SentencePiece tokenizers, for T5 and Marian folders without tokenizer.json.

Kudo and Richardson, "SentencePiece: A simple and language independent subword tokenizer" (2018).

Shape legend: B texts, L tokens of the longest, special ones included.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....support._extras import installing
from ..checkpoints.reading import read_json
from .own import Encoding
from .text import TextTokenizer, open_tokenizer

T5_FILE, MARIAN_FILES = "spiece.model", ("source.spm", "target.spm", "vocab.json")
TARGET_VOCABULARY = "target_vocab.json"
SENTINELS = 100  # default of T5


@dataclass(frozen=True, eq=False)
class Pieces:
    """The SentencePiece model of a language, and the id of each piece.

    Attributes:
        model: a `sentencepiece.SentencePieceProcessor`.
        ids: id by piece; other pieces are unknown.
        named: special tokens: piece by role, "eos", "unk" and "pad".
        codes: whether a text may begin with a language code such as ">>fr<<".
    """

    model: Any
    ids: Mapping[str, int]
    named: Mapping[str, str]
    codes: bool = False


class SentencePieceTokenizer:
    """The tokenizer of a T5 or Marian folder: the ids of transformers' `T5Tokenizer` and `MarianTokenizer`.

    An end token is added to each text. Special tokens spelled in a text, such as "<extra_id_0>", are recognised.

    Args:
        pieces: of input texts.
        target: of output texts; None is `pieces`.
        special: special tokens, besides the named ones.
        normalize: applied to each text first; None does not normalise. transformers applies the punctuation rules of
            the package sacremoses to Marian's texts, if that is installed: `MosesPunctNormalizer("en").normalize`.
        longest: the model's maximum number of tokens, if it has one.

    Attributes:
        targets: the tokenizer of output texts, for labels.
        pad: the id of padding.
        before, after: special tokens before and after a text.
    """

    before: tuple[int, ...] = ()

    def __init__(
        self,
        pieces: Pieces,
        target: Pieces | None = None,
        *,
        special: Sequence[str] = (),
        normalize: Callable[[str], str] | None = None,
        longest: int | None = None,
    ):
        self._pieces, self._normalize, self.longest = pieces, normalize, longest
        self.named = {role: pieces.ids[piece] for role, piece in pieces.named.items()}
        self.special = frozenset((*self.named.values(), *(pieces.ids[token] for token in special)))
        self.pad, self.after = self.named["pad"], (self.named["eos"],)
        self._spelled = re.compile("|".join(map(re.escape, (*pieces.named.values(), *special))))
        self._written = {token: piece for piece, token in pieces.ids.items()}
        self.targets = self
        if target is not None:
            self.targets = SentencePieceTokenizer(target, normalize=normalize, longest=longest)

    @property
    def vocabulary(self) -> int:
        """The number of tokens, special ones included."""
        return len(self._pieces.ids)

    def encode(self, text: str) -> Encoding:
        """The tokens of a text without the end token, with their characters."""
        text = self._normalized(text)
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for start, stop, special in self._parts(text):
            part = text[start:stop]
            pieces = [(part, (0, stop - start))] if special else self._placed(part)
            ids += [self._id(piece) for piece, _ in pieces]
            spans += [(start + first, start + last) for _, (first, last) in pieces]
        return Encoding(ids=ids, spans=spans)

    def whole(self, text: str) -> list[int]:
        """The ids of a text with the end token, without truncation."""
        text = self._normalized(text)
        ids: list[int] = []
        for start, stop, special in self._parts(text):
            pieces = [text[start:stop]] if special else self._pieces.model.encode(text[start:stop], out_type=str)
            ids += map(self._id, pieces)
        return [*ids, *self.after]

    def whole_many(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        """`whole` for each text, truncated to `longest` tokens; if None, to the model's limit."""
        limit = self.longest if longest is None else longest
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 2):
            raise ValueError(f"longest: expected an int above 1, for the end token, got {limit!r}")
        rows = [self.whole(text) for text in texts]
        return [ids if limit is None or len(ids) <= limit else [*ids[: limit - 1], *self.after] for ids in rows]

    def __call__(self, texts: str | Sequence[str], longest: int | None = None) -> dict[str, Tensor]:
        """A batch padded on the right: `input_ids` and `attention_mask`, int64 (B, L).

        Args:
            longest: maximum number of tokens of a text, end token included; longer texts are truncated. None: the
                model's limit.

        Raises:
            TypeError: not texts. ValueError: no texts.
        """
        rows = self.whole_many([texts] if isinstance(texts, str) else list(texts), longest)
        if not rows:
            raise ValueError("texts: empty, expected at least one text")
        length = max(map(len, rows))
        return {
            "input_ids": torch.tensor([row + [self.pad] * (length - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]),
        }

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """The text of token ids, without special tokens and outer spaces."""
        if self.targets is not self:
            return self.targets.decode(ids)
        pieces = [self.written(int(token)) for token in ids if int(token) not in self.special]
        # Pieces outside of this language's model keep the sign for a space.
        return self._pieces.model.decode(pieces).replace("\u2581", " ").strip()

    def written(self, token: int) -> str:
        """The vocabulary entry of a token. ValueError for an id outside the vocabulary."""
        if token not in self._written:
            raise ValueError(f"token: expected one of the vocabulary's {self.vocabulary} ids, got {token}")
        return self._written[token]

    def _id(self, piece: str) -> int:
        ids = self._pieces.ids
        return ids[piece] if piece in ids else self.named["unk"]

    def _normalized(self, text: Any) -> str:
        if not isinstance(text, str):
            raise TypeError(f"texts: expected text, got {type(text).__name__}")
        return text if self._normalize is None or not text else self._normalize(text)

    def _parts(self, text: str) -> Iterable[tuple[int, int, bool]]:
        """Spans of special tokens spelled in the text, and of the text between them."""
        begun = 0
        for match in self._spelled.finditer(text):
            yield from self._between(text, begun, match.start())
            yield match.start(), match.end(), True
            begun = match.end()
        yield from self._between(text, begun, len(text))

    def _between(self, text: str, start: int, stop: int) -> Iterable[tuple[int, int, bool]]:
        end = text.find("<<", start, stop) if self._pieces.codes and text.startswith(">>", start) else -1
        if end >= 0:
            yield start, end + 2, True
            start = end + 2
        if start < stop:
            yield start, stop, False

    def _placed(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        """Pieces with the characters they stand for, without the space before a word."""
        model, placed, at = self._pieces.model, [], 0
        pieces = model.encode(text, out_type=str)
        written, places = model.normalize(text, with_offsets=True)
        if "".join(pieces) != written:
            raise ValueError("encode: this SentencePiece model writes unknown characters as bytes; use whole()")
        for piece in pieces:
            start, stop = places[at], places[at + len(piece)]
            inside = text[start:stop]
            placed.append(
                (piece, (start + len(inside) - len(inside.lstrip()), stop) if inside.strip() else (start, stop))
            )
            at += len(piece)
        return placed


def is_sentencepiece(folder: Path) -> bool:
    """Whether a folder has a supported SentencePiece model and no tokenizer.json."""
    known = (folder / T5_FILE).is_file() or all((folder / name).is_file() for name in MARIAN_FILES)
    return known and not (folder / "tokenizer.json").is_file()


def open_sentencepiece(
    folder: str | Path, *, normalize: Callable[[str], str] | None = None, longest: int | None = None
) -> SentencePieceTokenizer:
    """The tokenizer of a folder with T5's spiece.model, or Marian's source.spm, target.spm and vocab.json.

    Args:
        normalize, longest: as in `SentencePieceTokenizer`.

    Raises:
        FileNotFoundError: no such files. ValueError: a damaged file, or `sentencepiece` is not installed.
    """
    folder = Path(folder)
    if (folder / T5_FILE).is_file():
        pieces, sentinels = _t5(folder)
        return SentencePieceTokenizer(pieces, special=sentinels, normalize=normalize, longest=longest)
    if all((folder / name).is_file() for name in MARIAN_FILES):
        source, target = _marian(folder)
        return SentencePieceTokenizer(source, target, normalize=normalize, longest=longest)
    raise FileNotFoundError(f"{folder}: expected {T5_FILE}, or {', '.join(MARIAN_FILES)}")


def open_either(folder: Path, longest: int | None) -> TextTokenizer | SentencePieceTokenizer:
    """The tokenizer of a T5 or Marian folder, from SentencePiece files or tokenizer.json. Errors as of both."""
    if is_sentencepiece(folder):
        return open_sentencepiece(folder, longest=longest)
    return open_tokenizer(folder, longest)


def _t5(folder: Path) -> tuple[Pieces, list[str]]:
    """The model's pieces, followed by the sentinels in reverse order."""
    model, settings = open_pieces(folder / T5_FILE), folder / "tokenizer_config.json"
    count = (read_json(settings) if settings.is_file() else {}).get("extra_ids", SENTINELS)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 100_000:
        raise ValueError(f"{settings}: extra_ids: expected an int from 0 to 100000, got {count!r:.80}")
    known = [model.id_to_piece(token) for token in range(model.get_piece_size())]
    sentinels = [f"<extra_id_{n}>" for n in range(count)]
    ids = {piece: token for token, piece in enumerate([*known, *reversed(sentinels)])}
    return _checked(folder / T5_FILE, Pieces(model, ids, _NAMED)), sentinels


def _marian(folder: Path) -> tuple[Pieces, Pieces]:
    source, target = (open_pieces(folder / name) for name in MARIAN_FILES[:2])
    words = _vocabulary(folder / "vocab.json")
    written = words
    if (folder / TARGET_VOCABULARY).is_file():  # source and target have separate embeddings
        written = _vocabulary(folder / TARGET_VOCABULARY)
    return (
        _checked(folder / "vocab.json", Pieces(source, words, _NAMED, codes=True)),
        _checked(folder / "vocab.json", Pieces(target, written, _NAMED, codes=True)),
    )


_NAMED = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def _checked(path: Path, pieces: Pieces) -> Pieces:
    missing = [piece for piece in pieces.named.values() if piece not in pieces.ids]
    if missing:
        raise ValueError(f"{path}: has no token {missing[0]}")
    return pieces


def _vocabulary(path: Path) -> dict[str, int]:
    words = read_json(path)
    if not isinstance(words, dict) or not all(type(token) is int and token >= 0 for token in words.values()):
        raise ValueError(f"{path}: damaged, expected an object of pieces and their ids")
    return words


def open_pieces(path: Path) -> Any:
    """A `sentencepiece.SentencePieceProcessor`. ValueError: a damaged file, or the package is not installed."""
    if importlib.util.find_spec("sentencepiece") is None:
        raise ValueError(f"{path}: needs the package sentencepiece, which is not installed: {installing('models')}")
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(path.read_bytes())
    except RuntimeError:
        raise ValueError(f"{path}: damaged, or no SentencePiece model") from None
    return model
