"""`answer`: spans of a context that answer a question. An encoder of both as a pair, with the logits of both ends.

Shape legend: B rows of a batch, L tokens of the longest, T tokens of a context.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver
from ...support._numbers import named_values
from .._task_registry import AnswerOptions
from ..models import Model
from ._baselines import STRENGTHS
from ._example_task import Batch, parted, widened
from ._task import Baseline, Details, Tested
from ._texts._answer_baseline import exact_match, word_f1, word_regression
from ._texts._entities import Entity
from ._texts._questions import Question, asked, read_asked, read_questions
from ._texts._reader import padded, text_output
from ._texts._tagged import TaggedText, split_text
from ._texts._tagged_picture import ComparedText, tagged_picture
from ._texts._text_task import EncoderTask

NOWHERE = -1  # characters of a token that is not of the context
NO_ANSWER = 0  # the column both ends of which say that the window holds no answer
_WRONG = 5  # answers that a report lists


@dataclasses.dataclass(frozen=True)
class FoundAnswer:
    """An answer: characters `start` to `stop` of the context, none if both are 0, and its share among all spans."""

    start: int
    stop: int
    probability: float | None = None


@dataclasses.dataclass(frozen=True)
class ContextRow:
    """A question and a window of its context as a row of a batch.

    Args:
        ids, types: of the tokens; types are None for models without them.
        characters: of the context that each token stands for.
        ends: the columns of the answer's first and last token; None if unknown.
    """

    ids: list[int]
    types: list[int] | None
    characters: list[tuple[int, int]]
    ends: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Answer(AnswerOptions, EncoderTask):
    """Answers to questions, as spans of a context.

    Each window of a context is read with the question. If a window does not hold the answer, the target is its first
    token (Devlin et al. 2019). Questions with and without an answer have separate scores. `predict` returns `answer`,
    its characters `start` to `end`, and `probability` among all possible spans.

    Args:
        long: "slide": overlapping windows over contexts that are too long, and the best span of all is the answer;
            "cut": tokens behind the limit are not read; "refuse": an error.
        longest_answer: tokens of an answer, at most.
        impossible: whether there are questions without an answer; learned from the training data.

    Raises:
        ValueError: an option outside of its range.

    Example:
        >>> import json, pathlib, tempfile, saccade
        >>> answer = {"text": "Bob", "start": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "questions.jsonl")
        ...     line = {"question": "Who was met?", "context": "Ada met Bob.", "answers": [answer]}
        ...     _ = path.write_text(json.dumps(line))
        ...     [question] = saccade.tasks.Answer().read(path)  # as `train("answer", path, out)` reads it
        >>> question.expected
        ['Bob']
    """

    impossible: bool = False

    head = "question-answering"
    longs = ("slide", "cut", "refuse")
    learned = ("impossible",)
    requires = ("sklearn.linear_model",)
    protocol = "exact match and F1 as of SQuAD: without capitals, signs and articles, the best of all answers given"
    compared = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest_answer < 1:
            raise ValueError(f"longest_answer: must be at least 1, got {self.longest_answer}")

    @property
    def deviation(self) -> float:
        """Larger than BERT's, which makes a narrow model's attention logits almost 0 and delays matching words."""
        return self.width**-0.5

    # --- data ---------------------------------------------------------------------------------------------------------

    def read(self, path: Path) -> list[Question]:
        return read_questions(path)

    def split(self, data: Sequence[Question], share: float, seed: int) -> tuple[list[Question], list[Question]]:
        """All questions about a context are in one part, so that contexts for validation are not trained on.

        ValueError if all questions are about one context.
        """
        numbers: dict[str, list[int]] = {}
        for n, example in enumerate(data):
            numbers.setdefault(example.context, []).append(n)
        groups = list(numbers.values())
        if len(groups) < 2:
            raise ValueError(f"context: the only one of {len(data)} questions cannot be split; give --validation")
        wanted = min(max(round(share * len(data)), 1), len(data) - 1)
        chosen: set[int] = set()
        for k in np.random.default_rng((seed, 0)).permutation(len(groups)):
            nearer = len(groups[k]) < 2 * (wanted - len(chosen))
            if nearer and len(chosen) + len(groups[k]) < len(data):
                chosen.update(groups[k])
        return parted(data, chosen or min(groups, key=len))

    def fitted(self, training: Sequence[Question]) -> Answer:
        if not any(example.answers for example in training):
            raise ValueError(f"answers: expected some to learn, none of the {len(training)} questions has one")
        return dataclasses.replace(self, impossible=any(not example.answers for example in training))

    def inputs(self, texts: Sequence[str]) -> list[Question]:
        return [asked(text, f"text {n}") for n, text in enumerate(texts, 1)]

    def read_inputs(self, path: Path) -> list[Question]:
        return read_asked(path)

    def is_empty(self, example: Question) -> bool:
        return not example.question

    def text_of(self, example: Question) -> str:
        return f"{example.question} {example.context}"

    def encode(self, model: Model, examples: Sequence[Question]) -> list[list[ContextRow]]:
        return [self._rows(model, example) for example in examples]

    def _rows(self, model: Model, example: Question) -> list[ContextRow]:
        tokenizer, limit = model.tokenizer, self.reader.limit(model.tokenizer)
        question, context = tokenizer.encode(example.question).ids, tokenizer.encode(example.context)
        if not context.ids:
            raise ValueError(
                f"{example.place}: context: the model's tokenizer has no token for {example.context!r:.40}"
            )
        spans = [_trimmed(example.context, span) for span in context.spans]
        around = len(tokenizer.pair(question, []).ids)
        if limit is not None and limit <= around:
            raise ValueError(
                f"{example.place}: the question has {len(question)} tokens, which leaves no room for its context in "
                f"the {limit} that are read"
            )
        self.reader.refuse_long(tokenizer, example.place, around + len(context.ids))
        rows = []
        for part in self.reader.parts(tokenizer, len(context.ids), around):
            row = tokenizer.pair(question, context.ids[part.start : part.stop])
            characters = [(NOWHERE, NOWHERE)] * len(row.ids)
            characters[row.second : row.second + len(part)] = spans[part.start : part.stop]
            ends = None if example.answers is None else _ends(example, row.second, spans, part)
            rows.append(ContextRow(row.ids, row.types, characters, ends))
        return rows

    def length(self, item: list[ContextRow]) -> int:
        return sum(len(row.ids) for row in item)

    def rows(self, item: list[ContextRow]) -> int:
        return len(item)

    def collate(
        self, model: Model, items: Sequence[list[ContextRow]], random: np.random.Generator | None = None
    ) -> Batch:
        """A batch: the tokens, their `characters` (B, L, 2), the question of each row, `texts` (B,), and `ends` (B,
        2)."""
        rows = [row for item in items for row in item]
        batch = padded(model, [row.ids for row in rows])
        characters = torch.full((*batch["input_ids"].shape, 2), NOWHERE)
        types = torch.zeros_like(batch["input_ids"])
        for n, row in enumerate(rows):
            characters[n, : len(row.ids)] = torch.tensor(row.characters)
            types[n, : len(row.ids)] = torch.tensor(row.types or 0)
        batch |= {"characters": characters, "texts": torch.tensor([n for n, item in enumerate(items) for _ in item])}
        ends = [row.ends for row in rows if row.ends is not None]
        return {
            **batch,
            **({} if rows[0].types is None else {"token_type_ids": types}),
            **({"ends": torch.tensor(ends)} if len(ends) == len(rows) else {}),
        }

    # --- loss ---------------------------------------------------------------------------------------------------------

    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> tuple[Tensor, Tensor]:
        """The logits (B, L) of the first and of the last token, -inf in the padding."""
        output = text_output(model, batch, observe)
        assert output.start_logits is not None and output.end_logits is not None
        return widened(output.start_logits), widened(output.end_logits)

    def loss(self, result: tuple[Tensor, Tensor], batch: Batch, *, learning: bool) -> Tensor:
        first, last = (F.cross_entropy(logits, batch["ends"][:, n]) for n, logits in enumerate(result))
        return (first + last) / 2

    def logits(self, result: tuple[Tensor, Tensor], batch: Batch) -> list[Tensor]:
        return list(result)

    def outputs(self, model: nn.Module, result: tuple[Tensor, Tensor], batch: Batch) -> list[FoundAnswer]:
        starts, stops = (logits.detach().double().cpu().numpy() for logits in result)
        characters, texts = batch["characters"].cpu().numpy(), batch["texts"].tolist()
        spans: list[list[_Best]] = [[] for _ in range(max(texts) + 1)]
        for row, text in enumerate(texts):
            spans[text].append(_best(starts[row], stops[row], characters[row], self.longest_answer))
        return [_joined(rows, self.impossible) for rows in spans]

    # --- metric and picture -------------------------------------------------------------------------------------------

    def scores(self, outputs: Sequence[FoundAnswer], data: Sequence[Question]) -> dict[str, float]:
        pairs = [(_text(example, found), example.expected) for example, found in zip(data, outputs, strict=True)]
        return {
            "exact match": float(np.mean([exact_match(*pair) for pair in pairs])),
            "F1": float(np.mean([word_f1(*pair) for pair in pairs])),
        }

    def baselines(
        self, model: Model, training: Sequence[Question], validation: Sequence[Question], tested: Sequence[Question]
    ) -> list[Baseline]:
        return [_regression(*word_regression(training, validation, tested))]

    def quick_baselines(
        self, model: Model, training: Sequence[Question], validation: Sequence[Question], tested: Sequence[Question]
    ) -> list[Baseline]:
        """The baseline with the strongest regularisation only: weaker ones take many times longer."""
        return [_regression(*word_regression(training, validation, tested, STRENGTHS[:1]))]

    def constant(self, model: Model, training: Sequence[Question], tested: Sequence[Question]) -> Baseline:
        """The most frequent answer if the context has it; otherwise no answer."""
        [(usual, _)] = Counter(question.expected[0] for question in training).most_common(1)
        starts = [question.context.find(usual) for question in tested]
        found = [FoundAnswer(0, 0) if start < 0 else FoundAnswer(start, start + len(usual)) for start in starts]
        return Baseline("always the most frequent answer", found)

    def details(self, outputs: Sequence[FoundAnswer], data: Sequence[Question]) -> Details:
        """`wrong` lists some questions with a wrong answer. If there are questions with and without an answer, `kinds`
        has the scores of each kind."""
        pairs = list(zip(data, outputs, strict=True))
        wrong = [
            {"question": one.question, "expected": one.expected[0], "answer": _text(one, found)}
            for one, found in pairs
            if not exact_match(_text(one, found), one.expected)
        ]
        parts = {}
        for name, wanted in (("with an answer", True), ("without an answer", False)):
            mine = [(one, found) for one, found in pairs if bool(one.answers) == wanted]
            if 0 < len(mine) < len(pairs):
                parts[name] = self.scores([found for _, found in mine], [one for one, _ in mine])
        lines = [f"{name}: {named_values(scores.items())}" for name, scores in parts.items()]
        for example in wrong[:_WRONG]:
            question = " ".join(example["question"].split())
            lines.append(f"{question:.60}  expected {example['expected']!r:.40}, got {example['answer']!r:.40}")
        return Details({"wrong": wrong[:_WRONG], **({"kinds": parts} if parts else {})}, "\n".join(lines))

    def picture(self, tested: Tested, kind: str) -> bytes:
        texts = []
        for example, found in zip(tested.data, tested.outputs, strict=True):
            words = split_text(example.context, example.place, "signs")
            truth = [(start, start + len(text)) for text, start in (example.answers or ())[:1]]
            right, given = (_marked(words, spans) for spans in (truth, [(found.start, found.stop)]))
            title = " ".join(example.question.split())
            texts.append(ComparedText([words.word(n) for n in range(len(words.words))], right, given, title))
        return tagged_picture(texts, kind)

    def shown(self, example: Question, output: FoundAnswer) -> dict[str, Any]:
        none = output.start == output.stop
        return {
            "question": example.question,
            "answer": _text(example, output),
            "probability": output.probability,
            "start": None if none else output.start,
            "end": None if none else output.stop,
            "context": example.context,
        }

    def line(self, shown: Mapping[str, Any]) -> str:
        answer = " ".join(shown["answer"].split()) or "(no answer)"
        return f"{answer} {shown['probability']:.4f}  {' '.join(shown['question'].split())}"


def _regression(spans: Sequence[tuple[int, int]], strength: float) -> Baseline:
    return Baseline(f"logistic regression on words (C = {strength:g})", [FoundAnswer(*span) for span in spans])


def _text(example: Question, page: FoundAnswer) -> str:
    return example.context[page.start : page.stop]


def _marked(words: TaggedText, spans: Sequence[tuple[int, int]]) -> list[Entity]:
    """The words that overlap spans of characters."""
    touched = [
        [n for n, (first, last) in enumerate(words.words) if first < stop and start < last] for start, stop in spans
    ]
    return [Entity("answer", inside[0], inside[-1] + 1) for inside in touched if inside]


def _trimmed(text: str, span: tuple[int, int]) -> tuple[int, int]:
    """The characters of a token without leading spaces, which some tokenizers include."""
    start, stop = span
    return stop - len(text[start:stop].lstrip()), stop


def _ends(example: Question, second: int, spans: Sequence[tuple[int, int]], part: range) -> tuple[int, int]:
    """The columns of the answer's first and last token; `NO_ANSWER` if the window does not hold all of it.

    Args:
        second: the column of the window's first token.
        spans: the characters of all tokens of the context.
        part: the tokens of the window.
    """
    if not example.answers:
        return NO_ANSWER, NO_ANSWER
    text, start = example.answers[0]
    inside = [n for n, (first, last) in enumerate(spans) if first < start + len(text) and start < last]
    if not inside or inside[0] not in part or inside[-1] not in part:
        return NO_ANSWER, NO_ANSWER
    return second + inside[0] - part.start, second + inside[-1] - part.start


@dataclasses.dataclass(frozen=True)
class _Best:
    """The best span of a window: its characters and score; the log-sum-exp of all scores; the score of no answer."""

    start: int
    stop: int
    score: float
    total: float
    none: float


def _best(starts: np.ndarray, stops: np.ndarray, characters: np.ndarray, longest: int) -> _Best:
    """A span's score is the logit of its first token plus that of its last.

    Args:
        starts, stops: (L,).
        characters: (L, 2).
        longest: tokens of a span, at most.
    """
    columns = np.flatnonzero(characters[:, 0] != NOWHERE)
    scores = starts[columns][:, None] + stops[columns]  # (T, T)
    allowed = np.triu(np.tril(np.ones_like(scores, dtype=bool), longest - 1))
    scores = np.where(allowed, scores, -np.inf)
    first, last = np.unravel_index(int(scores.argmax()), scores.shape)
    start, stop = int(characters[columns[first], 0]), int(characters[columns[last], 1])
    none = float(starts[NO_ANSWER] + stops[NO_ANSWER])
    best = float(scores[first, last])
    return _Best(start, stop, best, best + float(np.log(np.exp(scores - best).sum())), none)


def _joined(rows: Sequence[_Best], impossible: bool) -> FoundAnswer:
    """The best span of all windows; no answer, if that is better in each of them (Devlin et al. 2019)."""
    best = max(rows, key=lambda row: row.score)
    none = min(row.none for row in rows) if impossible else -np.inf
    total = float(np.logaddexp.reduce([none, *(row.total for row in rows)]))
    if none > best.score:
        return FoundAnswer(0, 0, float(np.exp(none - total)))
    return FoundAnswer(best.start, best.stop, float(np.exp(best.score - total)))
