"""Reading texts from files, and encoding them as one sequence of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...models import Tokenizer

TAIL = 0.1  # share of the text used for validation by default


def read_texts(path: str | Path) -> dict[Path, str]:
    """Read a text file, or all `*.txt` files below a folder: texts by path, in sorted order.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a folder without a .txt file; a file that is empty or not UTF-8 text. The message names the path.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "story.txt").write_text("Once upon a time.")
        ...     [(path, text)] = saccade.training.read_texts(folder).items()
        >>> path.name, text
        ('story.txt', 'Once upon a time.')
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: no .txt file in this folder")
    return {file: _read_text(file) for file in files}


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise ValueError(f"{path}: binary, not text (it holds a zero byte)")
    if not text.strip():
        raise ValueError(f"{path}: empty")
    return text


def split_tail(text: str, share: float = TAIL) -> tuple[str, str]:
    """Split a text into its beginning and its last `share`.

    Example:
        >>> import saccade
        >>> saccade.training.split_tail("0123456789", share=0.2)
        ('01234567', '89')
    """
    cut = int(len(text) * (1 - share))
    return text[:cut], text[cut:]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens to validate on.

    Args:
        training: (N,) int64: texts one after another, a start token before each.
        validation: (M,) int64, likewise.

    Example:
        >>> import saccade
        >>> tokenizer = saccade.models.load().tokenizer
        >>> corpus = saccade.training.Corpus.encode(["the cat"], ["the dog"], tokenizer)
        >>> corpus.training  # the start token, then the text
        tensor([   0, 1883,  277,  299])
    """

    training: Tensor
    validation: Tensor

    @classmethod
    def encode(cls, training: Sequence[str], validation: Sequence[str], tokenizer: Tokenizer) -> Corpus:
        return cls(encode_texts(training, tokenizer), encode_texts(validation, tokenizer))


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> Tensor:
    """Encode texts as one sequence of tokens, each text after a start token."""
    tokens: list[int] = []
    for text in texts:
        tokens.append(tokenizer.start)
        # Encoded line by line: the library then uses all cores, and its tokens never span a line break.
        for line in tokenizer.encode_many(text.splitlines(keepends=True)):
            tokens.extend(line)
    return torch.tensor(tokens, dtype=torch.int64)
