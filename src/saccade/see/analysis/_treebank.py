"""Sentences of a treebank in CoNLL-U: the rebuilt text, and the character spans of its words.

Format: Universal Dependencies, https://universaldependencies.org/format.html. Ten columns between tabs; a range (`3-4`)
is one written token of several words; empty nodes (`8.1`) are not in the text and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...support._numbers import counted
from ._texts import LARGEST_FILE

COLUMNS = 10


class TreebankWord(NamedTuple):
    """A word ``text[start:stop]`` of its sentence. All words of a range share its span if their forms do not spell it.

    Example:
        >>> from saccade.analysis import TreebankWord
        >>> word = TreebankWord("fly", start=5, stop=8, head=-1, relation="root", tag="VERB", misc={})
        >>> word.head  # the root of its sentence
        -1
    """

    form: str
    start: int
    stop: int
    head: int | None  # index of the word it depends on, -1 for the root; None if the file has none
    relation: str  # "" if the file has none
    tag: str  # the universal part of speech; "" if the file has none
    misc: dict[str, str | None]


class Sentence(NamedTuple):
    """A sentence of a treebank with its words. `read_treebank` returns it.

    Example:
        >>> from saccade.analysis import Sentence, TreebankWord
        >>> owls = TreebankWord("owls", 0, 4, head=1, relation="nsubj", tag="NOUN", misc={})
        >>> fly = TreebankWord("fly", 5, 8, head=-1, relation="root", tag="VERB", misc={})
        >>> sentence = Sentence("1", "owls fly", (owls, fly), new_document=False, metadata={})
        >>> sentence.words[sentence.words[0].head].form  # "owls" depends on it
        'fly'
    """

    name: str  # its sent_id, or its line in the file
    text: str
    words: tuple[TreebankWord, ...]
    new_document: bool
    metadata: dict[str, str | None]


def read_treebank(path: str | Path) -> list[Sentence]:
    r"""Read the sentences of a file in CoNLL-U.

    Raises:
        ValueError: a file that is not UTF-8 or not CoNLL-U, heads that do not exist, or a text (`# text`) that differs
            from its tokens. The message names the line, or the sentence and the token.

    Example:
        >>> import pathlib, tempfile
        >>> from saccade.analysis import read_treebank
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "owls.conllu")
        ...     first = "1\towls\towl\tNOUN\t_\t_\t2\tnsubj\t_\t_\n"
        ...     _ = path.write_text(first + "2\tfly\tfly\tVERB\t_\t_\t0\troot\t_\t_\n\n")
        ...     sentence = read_treebank(path)[0]
        >>> sentence.text, [(word.form, word.relation, word.head) for word in sentence.words]
        ('owls fly', [('owls', 'nsubj', 1), ('fly', 'root', -1)])
    """
    path = Path(path)
    return [_sentence(path, line, block) for line, block in _blocks(path)]


def _blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) of each sentence."""
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"{path}: larger than {LARGEST_FILE >> 20} MiB; give a part of it")
    try:
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8 (position {error.start:,})") from None
    block: list[str] = []
    sentences = 0
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            _check_line(path, number, line)
            block.append(line)
        elif block:
            if not all(line.startswith("#") for line in block):
                yield number - len(block), block
                sentences += 1
            block = []
    if not sentences:
        raise ValueError(f"{path}: no sentence in CoNLL-U")


def _check_line(path: Path, number: int, line: str) -> None:
    cells = line.split("\t")
    if not line.startswith("#") and len(cells) != COLUMNS:
        came = f"{counted(len(cells), 'column')} between tabs"
        raise ValueError(f"{path}:{number}: not CoNLL-U: {came}, expected {COLUMNS}: {line[:40]!r}")


def _sentence(path: Path, line: int, block: list[str]) -> Sentence:
    import conllu
    from conllu.exceptions import ParseException

    try:
        parsed = conllu.parse("\n".join(block) + "\n\n")
        (tokens,) = parsed
    except (ParseException, ValueError) as error:
        raise ValueError(f"{path}:{line}: not CoNLL-U: {error}") from None
    name = tokens.metadata.get("sent_id") or f"{path}:{line}"
    text, spans = _spelled(tokens)
    words = _words(name, tokens, spans)
    expected = tokens.metadata.get("text")
    if expected is not None and text.split() != expected.split():
        _refuse_text(name, words, text, expected)
    new = any(key.split(" ")[0] == "newdoc" for key in tokens.metadata)
    return Sentence(name, text, words, new, dict(tokens.metadata))


def _spelled(tokens: Any) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text, and the character span of each word by its number. A blank follows each token without SpaceAfter=No."""
    text, spans = "", {}
    last = 0  # the last word of the latest range
    for token in tokens:
        number = token["id"]
        if isinstance(number, int) and number <= last:
            continue
        if isinstance(number, tuple) and number[1] == ".":
            continue
        start, form = len(text), token["form"]
        text += form
        if isinstance(number, tuple):
            last = number[2]
            spans.update(_inside(tokens, number, form, start))
        else:
            spans[number] = (start, len(text))
        if (token.get("misc") or {}).get("SpaceAfter") != "No":
            text += " "
    return text.rstrip(), spans


def _inside(tokens: Any, number: tuple[int, str, int], form: str, start: int) -> dict[int, tuple[int, int]]:
    """The spans of the words of a range: their own if they spell it ("do" + "n't"), else the whole range."""
    inside = [t for t in tokens if isinstance(t["id"], int) and number[0] <= t["id"] <= number[2]]
    spelled = "".join(t["form"] for t in inside).casefold() == form.casefold()
    spans, at = {}, start
    for token in inside:
        end = at + len(token["form"])
        spans[token["id"]] = (at, end) if spelled else (start, start + len(form))
        at = end
    return spans


def _words(name: str, tokens: Any, spans: dict[int, tuple[int, int]]) -> tuple[TreebankWord, ...]:
    plain = [token for token in tokens if isinstance(token["id"], int)]
    words = []
    for place, token in enumerate(plain, 1):
        if token["id"] != place:
            raise ValueError(f"sentence {name}: token {token['form']!r} has number {token['id']}, expected {place}")
        head = token.get("head")
        if head is not None and not 0 <= head <= len(plain):
            raise ValueError(
                f"sentence {name}: the head of token {place} {token['form']!r} is {head}; there are {len(plain)} words"
            )
        if head == place:
            raise ValueError(f"sentence {name}: token {place} {token['form']!r} is its own head")
        start, stop = spans[place]
        words.append(
            TreebankWord(
                token["form"],
                start,
                stop,
                None if head is None else head - 1,
                _known(token.get("deprel")),
                _known(token.get("upos")),
                token.get("misc") or {},
            )
        )
    return tuple(words)


def _known(value: str | None) -> str:
    return "" if value in (None, "_") else str(value)


def _refuse_text(name: str, words: tuple[TreebankWord, ...], text: str, expected: str) -> None:
    """ValueError that names the first token that differs from the text."""
    same = 0
    while same < min(len(text), len(expected)) and text[same] == expected[same]:
        same += 1
    place, word = next(((i, w) for i, w in enumerate(words, 1) if w.stop > same), (len(words), words[-1]))
    raise ValueError(
        f"sentence {name}: its tokens do not spell its text: from token {place} {word.form!r} on they give "
        f"{text[same : same + 20]!r}, the text has {expected[same : same + 20]!r}"
    )
