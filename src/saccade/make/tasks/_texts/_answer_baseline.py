"""A simple model of answers: logistic regression on the words of a context, from scikit-learn."""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._baselines import STRENGTHS
from ._questions import Question
from ._tagged import split_text

_SIGNS = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> list[str]:
    """The words of an answer in lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_SIGNS)).split()


def exact_match(text: str, expected: Sequence[str]) -> float:
    """1 if the answer equals a right one after both are normalised, else 0."""
    return float(any(normalised(text) == normalised(one) for one in expected))


def word_f1(text: str, expected: Sequence[str]) -> float:
    """The largest F1 of the answer's words with the words of a right answer; 1 if both are empty."""
    return max(_f1(normalised(text), normalised(one)) for one in expected)


def _f1(names: list[str], expected: list[str]) -> float:
    if not names or not expected:
        return float(names == expected)
    common = (Counter(names) & Counter(expected)).total()
    return 2 * common / (len(names) + len(expected))


MOST = 2000  # questions that it learns from
_WIDEST = 10  # words of an answer
_LEAST = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)  # probabilities under which there is no answer, where there may be none
_ENDS = (".", "!", "?")

Span = tuple[int, int]
"""Characters of a context; (0, 0) is no answer."""


@dataclasses.dataclass(frozen=True)
class _Words:
    """The words of a context, with the number of the sentence and the features of each."""

    spans: Sequence[Span]
    sentences: list[int]
    features: list[dict[str, Any]]


def word_regression(
    training: Sequence[Question],
    validation: Sequence[Question],
    tested: Sequence[Question],
    strengths: Sequence[float] = STRENGTHS,
) -> tuple[list[Span], float]:
    """Answers by a regression that predicts whether a word is in the answer: the most probable word, and its neighbours
    while they are probable.

    What is known of a word: itself and its neighbours, itself and its letters beside the question's first word, how
    many words of the question its sentence has, whether another sentence has more of them, or as many later, and how
    far the next word of the question is. C, and the probability under which there is no answer, are those of
    `strengths` and `_LEAST` with the most exact matches on the validation data.

    Returns:
        An answer for each tested question, and C.
    """
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression

    chosen = np.random.default_rng(0).permutation(len(training))[:MOST]
    known = [(question, _words(question)) for question in (training[n] for n in sorted(chosen))]
    vectorizer = DictVectorizer()
    features = vectorizer.fit_transform([one for _, words in known for one in words.features])
    truth = np.array([inside for question, words in known for inside in _truth(question, words)])
    least = _LEAST if any(not question.answers for question in training) else _LEAST[:1]
    judged = [(question, _words(question)) for question in validation]
    best = (-1.0, strengths[0], 0.0, None)
    for strength in strengths:
        model = LogisticRegression(C=strength, max_iter=1000).fit(features, truth)
        likely = [_likely(model, vectorizer, words) for _, words in judged]
        for bound in least:
            found = [_span(words, p, bound) for (_, words), p in zip(judged, likely, strict=True)]
            right = float(np.mean([_right(one, span) for (one, _), span in zip(judged, found, strict=True)]))
            best = (right, strength, bound, model) if right > best[0] else best
    _, strength, bound, model = best
    words = [_words(question) for question in tested]
    return [_span(one, _likely(model, vectorizer, one), bound) for one in words], strength


def _likely(model: Any, vectorizer: Any, words: _Words) -> np.ndarray:
    return np.asarray(model.predict_proba(vectorizer.transform(words.features))[:, 1])


def _right(question: Question, span: Span) -> float:
    return exact_match(question.context[slice(*span)], question.expected)


def _span(words: _Words, likely: np.ndarray, bound: float) -> Span:
    """The most probable word, and its neighbours in the sentence whose probability is above one half."""
    best = int(np.argmax(likely))
    if likely[best] < bound:
        return 0, 0
    first = last = best
    while first and _goes_on(words, likely, first - 1, best) and last - first < _WIDEST - 1:
        first -= 1
    while last + 1 < len(likely) and _goes_on(words, likely, last + 1, best) and last - first < _WIDEST - 1:
        last += 1
    return words.spans[first][0], words.spans[last][1]


def _goes_on(words: _Words, likely: np.ndarray, other: int, best: int) -> bool:
    return likely[other] > 0.5 and words.sentences[other] == words.sentences[best]


def _truth(question: Question, words: _Words) -> list[bool]:
    answers = [(start, start + len(text)) for text, start in (question.answers or ())[:1]]
    return [any(first < stop and start < last for start, stop in answers) for first, last in words.spans]


def _words(question: Question) -> _Words:
    example = split_text(question.context, question.place, "signs")
    asked = split_text(question.question, question.place, "signs")
    wanted = [asked.word(n).lower() for n in range(len(asked.words))]
    texts = [example.word(n) for n in range(len(example.words))]
    sentences = [0, *itertools.accumulate(text in _ENDS for text in texts)][: len(texts)]
    return _Words(example.words, sentences, list(_features(texts, sentences, wanted)))


def _features(texts: list[str], sentences: list[int], wanted: list[str]) -> Iterator[dict[str, Any]]:
    lower = [text.lower() for text in texts]
    asked = {word for word in wanted if word.isalnum()}
    found: list[set[str]] = [set() for _ in range(sentences[-1] + 1)]
    for word, sentence in zip(lower, sentences, strict=True):
        found[sentence] |= {word} & asked
    shared = [len(one) for one in found]
    places: list[list[int]] = [[] for _ in found]
    for n, word in enumerate(lower):
        if word in asked:
            places[sentences[n]].append(n)
    for n, word in enumerate(lower):
        sentence = sentences[n]
        mine = shared[sentence]
        near = [abs(n - m) for m in places[sentence]]
        yield {
            "word": word,
            "before": lower[n - 1] if n else "",
            "after": lower[n + 1] if n + 1 < len(lower) else "",
            "wanted": f"{wanted[0]} {word}",
            "letters": f"{wanted[0]} {_letters(texts[n])}",
            "asked": word in asked,
            "shared": mine / max(len(asked), 1),
            "more elsewhere": any(other > mine for other in shared),
            "as many later": mine in shared[sentence + 1 :],
            "distance": str(min([*near, 9])),
        }


def _letters(word: str) -> str:
    return (
        "sign" if not word.isalnum() else "digits" if word[0].isdigit() else "capital" if word[0].isupper() else "low"
    )
