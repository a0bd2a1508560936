"""Questions with answers in their contexts, from files: JSON as of SQuAD, or JSON lines.

Every error names the file, and the line or the question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....support._plain_values import NotJson, parsed_json
from .._examples import read_content, read_lines, read_table

BETWEEN = "|||"  # a question and its context, as one text


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and the context that answers it.

    Args:
        answers: text and first character of each right answer; empty if the context has none; None if unknown.
        place: file and question, for messages: `squad.json: question 57284618`.
    """

    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None
    place: str

    @property
    def expected(self) -> list[str]:
        """The right answers; "" if there is none."""
        assert self.answers is not None
        return [text for text, _ in self.answers] or [""]


def read_questions(path: Path) -> list[Question]:
    """The questions of a .jsonl or a SQuAD .json.

    A line has `question`, `context` and `answers`, each with `text` and `start`, or a text alone that is in the context
    only once. `answers` may be as the library `datasets` has them: `{"text": [...], "answer_start": [...]}`.

    Raises:
        FileNotFoundError, ValueError: no such file, another ending, no question, a value that is missing or of another
            type, an answer that is not in its context where it is said to be.
    """
    if path.suffix.lower() == ".json":
        return _squad(path, answered=True)
    rows = read_table(path, ("question", "context", "answers"))
    return [_answered(*values, place=place) for place, values in rows]


def _answered(question: Any, context: Any, answers: Any, *, place: str) -> Question:
    """A question of a line."""
    found = _answers(_each_answer(answers, place), "start", place, _text("context", context, place))
    return _question(question, context, found, place)


def _each_answer(answers: Any, place: str) -> Any:
    """Answers with `text` and `start`, also from lists of each, and from `answer_start`."""
    if isinstance(answers, dict) and {"text", "answer_start"} <= answers.keys():
        texts, starts = answers["text"], answers["answer_start"]
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise ValueError(f"{place}: answers: expected as many texts as starts, in lists, got {answers!r:.60}")
        return [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list):
        return answers
    return [
        {"start": answer["answer_start"], **answer} if isinstance(answer, dict) and "answer_start" in answer else answer
        for answer in answers
    ]


def read_asked(path: Path) -> list[Question]:
    """Questions without answers: as of `read_questions`, or a text with one a line, empty lines too."""
    kind = path.suffix.lower()
    if kind == ".json":
        return _squad(path, answered=False)
    if kind == ".jsonl":
        rows = read_table(path, ("question", "context"))
        return [_question(question, context, None, place) for place, (question, context) in rows]
    lines = [(f"{path}: line {n}", line) for n, line in enumerate(read_lines(path), 1)]
    if not any(line.strip() for _, line in lines):
        raise ValueError(f"{path}: holds no question")
    return [asked(line, at) if line.strip() else Question("", "", None, at) for at, line in lines]


def asked(text: str, place: str) -> Question:
    """`where is Ada? ||| Ada went to Paris.` as a question. ValueError without the bars."""
    question, between, context = text.partition(BETWEEN)
    if not between:
        raise ValueError(f"{place}: expected a question and its context with {BETWEEN} between them, got {text!r:.60}")
    return _question(question.strip(), context.strip(), None, place)


def _question(question: Any, context: Any, answers: list[tuple[str, int]] | None, place: str) -> Question:
    question, context = _text("question", question, place), _text("context", context, place)
    for text, start in answers or ():
        if not 0 <= start <= len(context) - len(text) or context[start : start + len(text)] != text:
            there = context[max(start, 0) : max(start, 0) + len(text)]
            raise ValueError(
                f"{place}: the answer {text!r:.60} is not at {start} of the context; there is {there!r:.60}"
            )
    return Question(question, context, None if answers is None else tuple(answers), place)


def _answers(values: Any, start: str, place: str, context: str | None) -> list[tuple[str, int]]:
    """The text and the first character of each answer."""
    if isinstance(values, str) and context is not None:
        values = [values]
    if not isinstance(values, list):
        raise ValueError(f"{place}: answers: expected a list, got {values!r:.40}")
    found = []
    for value in values:
        if isinstance(value, str) and context is not None:
            value = {"text": value, start: _only_place(value, context, start, place)}
        text, at = (value.get("text"), value.get(start)) if isinstance(value, dict) else (None, None)
        if not isinstance(text, str) or not text.strip() or type(at) is not int:
            raise ValueError(f"{place}: answers: expected a text and its {start}, got {value!r:.60}")
        found.append((text, at))
    return found


def _text(name: str, value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {name}: expected a text, got {value!r:.40}")
    return value


def _only_place(text: str, context: str, start: str, place: str) -> int:
    """The position of a text in its context. ValueError if it is missing, or occurs several times."""
    count = sum(context.startswith(text, n) for n in range(len(context))) if text.strip() else 0
    if count != 1:
        told = f"in the context {count} times" if count else "not in the context"
        expected = f'{{"text": ..., "{start}": ...}}' if count else "a text of it"
        raise ValueError(f"{place}: answers: {text!r:.60} is {told}; expected {expected}")
    return context.index(text)


_FORM = '{"data": [{"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": ...}]}]}]}'


def _squad(path: Path, *, answered: bool) -> list[Question]:
    try:
        values = parsed_json(read_content(path))
        found = list(_asked_of(values["data"], path, answered=answered))
    except NotJson as error:
        lines = "; a file of JSON lines ends in .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{path}: not JSON ({error}){lines}") from None
    except (KeyError, TypeError, AttributeError) as error:
        missing = f"; {error} is missing" if isinstance(error, KeyError) else ""
        raise ValueError(f"{path}: not the form of SQuAD, {_FORM}{missing}") from None
    if not found:
        raise ValueError(f"{path}: holds no questions")
    return found


def _asked_of(articles: Any, path: Path, *, answered: bool) -> Iterator[Question]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for one in paragraph["qas"]:
                place = f"{path}: question {one.get('id', one['question'])}"
                answers = _answers_of(one, place) if answered else None
                yield _question(one["question"], paragraph["context"], answers, place)


def _answers_of(values: Any, place: str) -> list[tuple[str, int]]:
    """The answers of a SQuAD question."""
    return [] if values.get("is_impossible", False) else _answers(values["answers"], "answer_start", place, None)
