"""Labels of words, for probes: a treebank's column, or two columns of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ._texts import read_text
from ._treebank import read_treebank

COLUMNS = ("upos", "deprel")


class LabelledSentence(NamedTuple):
    """A sentence with the characters of its words and a label for each; None where a word has none."""

    name: str
    text: str
    words: tuple[tuple[int, int], ...]
    labels: tuple[str | None, ...]

    @property
    def forms(self) -> list[str]:
        return [self.text[start:stop] for start, stop in self.words]


def read_labels(path: str | Path, column: str = "upos") -> list[LabelledSentence]:
    """The sentences of a file, by its ending: the column of a .conllu, else `word<TAB>label` lines with blank lines
    between sentences, whose words stand between blanks in the text.

    Raises:
        ValueError: damaged; fewer than two labels, or fewer than two sentences.
    """
    path = Path(path)
    found = _from_treebank(path, column) if path.suffix in (".conllu", ".conll") else _from_columns(path)
    labels = {label for sentence in found for label in sentence.labels} - {None}
    if len(labels) < 2:
        raise ValueError(f"{path}: {len(labels)} different labels came; a probe tells two or more apart")
    if len(found) < 2:
        raise ValueError(f"{path}: {len(found)} sentence came; some are needed to learn from, others to test on")
    return found


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
