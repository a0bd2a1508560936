"""Texts with annotated mentions of entities: JSON lines, or CoNLL-U with CorefUD's `Entity`.

JSON lines: each line has a text and its clusters of mentions. A mention is [start, stop] in characters, or [start,
stop, head start, head stop] with the characters of its head word:

    {"text": "Ann said she left.", "clusters": [[[0, 3], [9, 12]]]}

CorefUD 1.x (https://ufal.mff.cuni.cz/corefud): brackets in MISC open and close mentions, `Entity=(e1-person-1` and
later `Entity=e1)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...support._plain_values import parsed_json
from ..inspection import split_words
from ._texts import read_text
from ._treebank import Sentence, TreebankWord, read_treebank

KINDS = {"": "", "PRON": "pronoun", "DET": "pronoun", "PROPN": "name"}  # by the tag of the head word


class Mention(NamedTuple):
    """The words ``first <= w <= last`` of a text, which name `entity`. Word `head` is their head word.

    Example:
        >>> from saccade.analysis import Mention
        >>> Mention(first=0, last=2, head=2, entity="e1", kind="other").entity
        'e1'
    """

    first: int
    last: int
    head: int
    entity: str
    kind: str = ""  # "pronoun", "name" or "other", "" where not known


class Document(NamedTuple):
    """A text, the character spans of its words, and its mentions. `read_coreference` returns it.

    Example:
        >>> from saccade.analysis import Document, Mention
        >>> words = ((0, 3), (4, 8), (9, 12), (13, 17))
        >>> mentions = (Mention(0, 0, 0, "ann"), Mention(2, 2, 2, "ann"))
        >>> document = Document("1", "Ann said she left", words, mentions)
        >>> [document.text[slice(*document.words[mention.head])] for mention in document.mentions]
        ['Ann', 'she']
    """

    name: str
    text: str
    words: tuple[tuple[int, int], ...]  # characters
    mentions: tuple[Mention, ...]  # in the order of their first words


def read_coreference(path: str | Path) -> list[Document]:
    """Read the documents of a file with mentions: .conllu with CorefUD's `Entity`, or JSON lines.

    A JSON line is a text with its clusters. A mention is ``[start, stop]`` in characters, or ``[start, stop, head
    start, head stop]``; without these its head word is the last one. In CoNLL-U the dependency tree gives the head
    words, and of a mention in several parts only the first part counts.

    Raises:
        ValueError: a damaged file, mentions that hold no word of their text, or no entity with two mentions.

    Example:
        >>> import pathlib, tempfile
        >>> from saccade.analysis import read_coreference
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "mentions.jsonl")
        ...     _ = path.write_text('{"text": "Ann said she left.", "clusters": [[[0, 3], [9, 12]]]}')
        ...     documents = read_coreference(path)
        >>> documents[0].mentions
        (Mention(first=0, last=0, head=0, entity='0', kind=''), Mention(first=2, last=2, head=2, entity='0', kind=''))
    """
    path = Path(path)
    documents = _from_treebank(path) if path.suffix in (".conllu", ".conll") else _from_lines(path)
    if not any(len(held) > len({m.entity for m in held}) for held in (d.mentions for d in documents)):
        raise ValueError(f"{path}: no entity is mentioned twice, so there is no antecedent")
    return documents


# JSON lines


def _from_lines(path: Path) -> list[Document]:
    documents = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            try:
                given = parsed_json(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from None
            documents.append(_document(where, given))
    return documents


def _document(where: str, given: Any) -> Document:
    text = given.get("text") if isinstance(given, dict) else None
    clusters = given.get("clusters") if isinstance(given, dict) else None
    if not isinstance(text, str) or not isinstance(clusters, list):
        raise ValueError(f'{where}: expected {{"text": "...", "clusters": [[[start, stop], ...], ...]}}')
    words = tuple(split_words(text))
    mentions = []
    for entity, cluster in enumerate(clusters):
        for span in cluster if isinstance(cluster, list) else [cluster]:
            mentions.append(_mention(where, text, words, span, str(entity)))
    return Document(where, text, words, tuple(sorted(mentions)))


def _mention(where: str, text: str, words: Sequence[tuple[int, int]], span: Any, entity: str) -> Mention:
    right = isinstance(span, list) and len(span) in (2, 4) and all(type(x) is int for x in span)
    if not right or not 0 <= span[0] < span[1] <= len(text):
        raise ValueError(
            f"{where}: cluster {entity}: a mention is [start, stop] or [start, stop, head start, head stop] in the "
            f"{len(text)} characters of the text, got {span!r}"
        )
    held = _held(words, span[0], span[1])
    heads = _held(words, span[2], span[3]) if len(span) == 4 else held[-1:]
    if not held or not heads or not held[0] <= heads[-1] <= held[-1]:
        raise ValueError(f"{where}: cluster {entity}: {text[span[0] : span[1]]!r} {span} holds no word of the text")
    return Mention(held[0], held[-1], heads[-1], entity)


def _held(words: Sequence[tuple[int, int]], start: int, stop: int) -> list[int]:
    return [w for w, (a, b) in enumerate(words) if a < stop and start < b]


# CorefUD


def _from_treebank(path: Path) -> list[Document]:
    return [_joined(sentences) for sentences in _by_document(read_treebank(path))]


def _by_document(sentences: Sequence[Sentence]) -> Iterator[list[Sentence]]:
    held: list[Sentence] = []
    for sentence in sentences:
        if sentence.new_document and held:
            yield held
            held = []
        held.append(sentence)
    yield held


def _joined(sentences: list[Sentence]) -> Document:
    """One text of all sentences, with blanks between them; a mention may span several sentences."""
    text = ""
    spans: list[tuple[int, int]] = []
    words: list[TreebankWord] = []
    first_words: list[int] = []
    for sentence in sentences:
        start = len(text) + bool(text)
        text = f"{text} {sentence.text}" if text else sentence.text
        first_words.append(len(words))
        spans += [(start + word.start, start + word.stop) for word in sentence.words]
        words += [word._replace(head=_moved(word.head, len(words))) for word in sentence.words]
    mentions: list[Mention] = []
    open_: dict[str, list[int]] = {}
    for sentence, first in zip(sentences, first_words, strict=True):
        for at in range(first, first + len(sentence.words)):
            for bracket, entity in _brackets(sentence, words[at], at - first):
                if bracket != ")":
                    open_.setdefault(entity, []).append(at)
                if bracket != "(":
                    if not open_.get(entity):
                        _refuse(sentence, words[at], at - first, f"closes {entity!r}, which is not open")
                    begin = open_[entity].pop()
                    head = _head(words, begin, at)
                    mentions.append(Mention(begin, at, head, entity, KINDS.get(words[head].tag, "other")))
    still = [entity for entity, begun in open_.items() if begun]
    if still:
        raise ValueError(f"document from sentence {sentences[0].name} on: mention of {still[0]!r} is never closed")
    return Document(sentences[0].name, text, tuple(spans), tuple(sorted(mentions)))


def _moved(head: int | None, by: int) -> int | None:
    return head if head is None or head < 0 else head + by


def _brackets(sentence: Sentence, word: TreebankWord, place: int) -> Iterator[tuple[str, str]]:
    """(bracket, entity) in the order they are written; the bracket is "(", ")" or "()".

    Of a mention in parts (`e1[1/2]`) only the first counts: the others would be its antecedents.
    """
    given = word.misc.get("Entity")
    if not given:
        return
    parts = re.findall(r"\(([^()\s-]+)[^()]*(\))?|([^()\s]+)\)", given)
    if sum(len(bracket) for bracket in re.findall(r"[()]", given)) != sum(1 + bool(a and b) for a, b, _ in parts):
        _refuse(sentence, word, place, f"has Entity={given}, which is not CorefUD's")
    for opened, closed, alone in parts:
        name, _, part = (opened or alone.split("-")[0]).partition("[")
        if not part or part.startswith("1/"):
            yield ("()" if closed else "(") if opened else ")", name


def _refuse(sentence: Sentence, word: TreebankWord, place: int, what: str) -> None:
    raise ValueError(f"sentence {sentence.name}: token {place + 1} {word.form!r} {what}")


def _head(words: Sequence[TreebankWord], first: int, last: int) -> int:
    """The word of the mention whose head lies outside the mention; the last word in a file without trees."""
    heads = {w: words[w].head for w in range(first, last + 1)}
    outside = [w for w, head in heads.items() if head is None or not first <= head <= last]
    return outside[0] if outside and words[outside[0]].head is not None else last
