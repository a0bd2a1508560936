"""Labels of words, for probes: a treebank's column, or a file with two columns."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ._texts import read_text
from ._treebank import read_treebank

COLUMNS = ("upos", "deprel")


class LabelledSentence(NamedTuple):
    """A sentence with the character spans of its words, and a label for each word or None.

    Example:
        >>> from saccade.analysis import LabelledSentence
        >>> sentence = LabelledSentence("1", "owls fly", ((0, 4), (5, 8)), ("NOUN", "VERB"))
        >>> sentence.forms
        ['owls', 'fly']
    """

    name: str
    text: str
    words: tuple[tuple[int, int], ...]
    labels: tuple[str | None, ...]

    @property
    def forms(self) -> list[str]:
        return [self.text[start:stop] for start, stop in self.words]


def read_labels(path: str | Path, column: str = "upos") -> list[LabelledSentence]:
    r"""Read the sentences of a file, with a label for each word.

    A .conllu file gives the labels of ``column``. Any other file has lines of `word<TAB>label`, and blank lines between
    sentences; blanks separate the words of the text.

    Args:
        column: "upos" (part of speech) or "deprel" (relation).

    Raises:
        ValueError: a damaged file, fewer than two labels, or fewer than two sentences.

    Example:
        >>> import pathlib, tempfile
        >>> from saccade.analysis import read_labels
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "tags.tsv")
        ...     _ = path.write_text("owls\tNOUN\nfly\tVERB\n\nmice\tNOUN\nrun\tVERB\n")
        ...     sentences = read_labels(path)
        >>> [(sentence.text, sentence.labels) for sentence in sentences]
        [('owls fly', ('NOUN', 'VERB')), ('mice run', ('NOUN', 'VERB'))]
    """
    path = Path(path)
    sentences = _from_treebank(path, column) if path.suffix in (".conllu", ".conll") else _from_columns(path)
    labels = {label for sentence in sentences for label in sentence.labels} - {None}
    if len(labels) < 2:
        raise ValueError(f"{path}: expected two or more different labels, got {len(labels)}")
    if len(sentences) < 2:
        raise ValueError(f"{path}: expected two or more sentences, to learn from and to test on, got {len(sentences)}")
    return sentences


def _from_treebank(path: Path, column: str) -> list[LabelledSentence]:
    if column not in COLUMNS:
        raise ValueError(f"column: expected {' or '.join(COLUMNS)}, got {column!r}")
    return [
        LabelledSentence(
            sentence.name,
            sentence.text,
            tuple((word.start, word.stop) for word in sentence.words),
            tuple((word.tag if column == "upos" else word.relation) or None for word in sentence.words),
        )
        for sentence in read_treebank(path)
    ]


def _from_columns(path: Path) -> list[LabelledSentence]:
    sentences: list[LabelledSentence] = []
    held: list[tuple[str, str]] = []
    for number, line in enumerate([*read_text(path).split("\n"), ""], 1):
        if line.strip():
            held.append(_pair(path, number, line))
        elif held:
            sentences.append(_sentence(f"{path}:{number - len(held)}", held))
            held = []
    return sentences


def _pair(path: Path, number: int, line: str) -> tuple[str, str]:
    cells = line.split("\t")
    if len(cells) != 2 or not cells[0].strip() or not cells[1].strip():
        raise ValueError(f"{path}:{number}: expected a word, a tab and a label, got {line[:40]!r}")
    return cells[0].strip(), cells[1].strip()


def _sentence(name: str, pairs: list[tuple[str, str]]) -> LabelledSentence:
    at, spans = 0, []
    for word, _ in pairs:
        spans.append((at, at + len(word)))
        at += len(word) + 1
    return LabelledSentence(name, " ".join(word for word, _ in pairs), tuple(spans), tuple(label for _, label in pairs))
