"""Texts to study: files, cut into pieces that fit the context of every model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..inspection import TextModel

LARGEST_FILE = 64 * 2**20  # bytes
LONGEST_WORD = 64  # characters; a longer run without a blank is a script without blanks
CHARACTERS = 8  # first guess for each token of a piece; raised where tokens are longer


class Text(NamedTuple):
    """A text and its name: its file, and the character at which it begins.

    Example:
        >>> from saccade.analysis import Text
        >>> Text("owl.txt", "The owl sat in the oak.").name
        'owl.txt'
    """

    name: str  # its file, and the first character
    text: str


def read_files(paths: Sequence[str | Path]) -> list[Text]:
    r"""Read text files, and the .txt files in folders, in order.

    Raises:
        FileNotFoundError: no such file, or a folder without .txt files.
        ValueError: a file that is not UTF-8 text or is too large, or files with only blanks.

    Example:
        >>> import pathlib, tempfile
        >>> from saccade.analysis import read_files
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "owl.txt").write_text("The owl sat in the oak.\n")
        ...     texts = read_files([folder])
        >>> [text.text for text in texts]
        ['The owl sat in the oak.']
    """
    files: list[Path] = []
    for path in map(Path, paths):
        matches = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not matches:
            raise FileNotFoundError(f"{path}: the folder holds no .txt file")
        files += matches
    texts = [Text(str(path), read_text(path)) for path in files]
    if not any(text for _, text in texts):
        raise ValueError(f"{', '.join(map(str, paths))}: expected texts, got only blanks")
    return [text for text in texts if text.text]


def read_text(path: Path) -> str:
    """A text file with line ends as one character, and without blanks around it."""
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path}: expected at most {LARGEST_FILE >> 20} MiB; pass a part of the file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise ValueError(f"{path}: not a text in UTF-8 (byte {byte:#04x} at position {error.start:,})") from None
    if "\0" in text:
        raise ValueError(f"{path}: a binary file, not a text")
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def cut(documents: Sequence[Text], models: Sequence[TextModel], *, tokens: int, most: int) -> list[Text]:
    """Cut documents into at most `most` pieces of at most `tokens` tokens, the same pieces for all models.

    The pieces are spread evenly over the documents. A piece ends at the end of a word and fits the context of every
    model, special tokens included.

    Example:
        >>> from saccade.analysis import Text, cut
        >>> from saccade.inspection import open_model
        >>> documents = [Text("owl.txt", "The owl sat in the oak. " * 50)]
        >>> for piece in cut(documents, [open_model()], tokens=12, most=2):
        ...     print(piece.name, "|", piece.text)
        owl.txt:0 | The owl sat in the oak. The
        owl.txt:600 | The owl sat in the oak. The
    """
    if most < len(documents):
        documents = [documents[i * len(documents) // most] for i in range(most)]
    total = sum(len(document.text) for document in documents)
    pieces: list[Text] = []
    for document in documents:
        share = (most - len(documents)) * len(document.text) // total
        pieces += _pieces(document, models, tokens, 1 + share)
    return pieces


def _pieces(document: Text, models: Sequence[TextModel], tokens: int, count: int) -> list[Text]:
    """Pieces without gaps if `count` of them cover the document, else pieces that begin at even distances."""
    pieces, end = _pieces_from([0] * count, document, models, tokens)
    if document.text[end:].strip():
        length = len(document.text)
        starts = [_start_of_word(document.text, k * length // count) for k in range(count)]
        pieces, _ = _pieces_from(starts, document, models, tokens)
    return pieces


def _pieces_from(
    starts: Sequence[int], document: Text, models: Sequence[TextModel], tokens: int
) -> tuple[list[Text], int]:
    """Pieces that begin at `starts`, or at the end of the piece before if that is later; and the end of the last
    piece."""
    text, end, pieces = document.text, 0, []
    for start in starts:
        start = max(start, end)
        while start < len(text) and text[start].isspace():
            start += 1
        if start >= len(text):
            break
        end = min(fitting(model, text, start, tokens) for model in models)
        end = start + len(text[start:end].rstrip())
        if end > start:
            pieces.append(Text(f"{document.name}:{start}", text[start:end]))
    return pieces, end


def _start_of_word(text: str, at: int) -> int:
    """The start of the word that holds `at`; `at` itself in a script without blanks."""
    start = at
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    return start if at - start <= LONGEST_WORD else at


def fitting(model: TextModel, text: str, start: int, tokens: int) -> int:
    """The end of the longest piece of `text` from `start` on with at most `tokens` tokens, special ones included.

    It ends at a blank if the piece has one. `start` itself if no token fits.
    """
    around = len(model.before) + len(model.after)
    room = min(tokens if model.context is None else min(tokens, model.context), len(text) + around) - around
    if room < 1:
        return start
    reach = room * CHARACTERS
    spans = model.encode(text[start : start + reach]).spans
    while len(spans) <= room and start + reach < len(text):
        reach *= 2
        spans = model.encode(text[start : start + reach]).spans
    if len(spans) <= room:
        return len(text)
    # The token after the last that fits begins inside a character that is cut in two, or where the piece ends.
    end = start + min(spans[room - 1][1], spans[room][0])
    end = _last_blank(text, start, end)
    while end > start and len(model.encode(text[start:end]).ids) > room:  # a cut text may have other tokens
        end = _last_blank(text, start, end - 1)
    return end


def _last_blank(text: str, start: int, end: int) -> int:
    """The end of the last word that ends by `end`; `end` where there is only one word."""
    if end >= len(text) or text[end].isspace():
        return end
    at = end
    while at > start and not text[at - 1].isspace():
        at -= 1
    return end if not text[start:at].strip() else start + len(text[start:at].rstrip())
