"""Simple models from scikit-learn, with which trained models are compared."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_FREQUENT = "always naming the most frequent class"
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # C, the inverse of the regularisation

Labelled = tuple[Sequence[str], np.ndarray]
"""Texts with the numbers of their classes, or with a row of booleans for their labels."""
Featured = tuple[Any, np.ndarray]
"""Features (N, D), which may be sparse, and the numbers of classes."""


def most_frequent_class(training: np.ndarray, classes: int, count: int) -> list[np.ndarray]:
    """`count` times the one-hot probabilities (K,) of the most frequent class."""
    return [np.eye(classes)[np.bincount(training).argmax()]] * count


def tfidf_regression(training: Labelled, validation: Labelled, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """Logistic regression on words and pairs of words, weighed by TF-IDF.

    Returns:
        The probabilities (N, K) of the classes of `texts`, and C as of `strongest_regression`.
    """
    known, judged, asked = _tfidf(training[0], validation[0], texts)
    return strongest_regression((known, training[1]), (judged, validation[1]), asked)


def strongest_regression(training: Featured, validation: Featured, asked: Any) -> tuple[np.ndarray, float]:
    """Logistic regression on features.

    It learns from the training examples alone; C is the one of `STRENGTHS` that is right most often on the validation
    examples (of equally good ones the smallest).

    Returns:
        The probabilities (N, K) of the classes of `asked`, (N, D) features, and C.
    """
    from sklearn.linear_model import LogisticRegression

    models = [LogisticRegression(C=strength, max_iter=1000).fit(*training) for strength in STRENGTHS]
    right = [float((model.predict(validation[0]) == validation[1]).mean()) for model in models]
    best = int(np.argmax(right))
    found = np.zeros((asked.shape[0], int(training[1].max()) + 1))  # a class may have no example
    found[:, models[best].classes_] = models[best].predict_proba(asked)
    return found, STRENGTHS[best]


def tfidf_one_vs_rest(training: Labelled, validation: Labelled, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """As `tfidf_regression`, for each label separately, for texts with any number of labels, bool (N, K); the micro F1
    selects C."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.multiclass import OneVsRestClassifier

    known, judged, asked = _tfidf(training[0], validation[0], texts)
    models = [OneVsRestClassifier(LogisticRegression(C=strength, max_iter=1000)) for strength in STRENGTHS]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Label not .* is present in all training examples")
        predictions = [model.fit(known, training[1]).predict(judged) for model in models]
    right = [f1_score(validation[1], predicted, average="micro", zero_division=0) for predicted in predictions]
    best = int(np.argmax(right))
    return models[best].predict_proba(asked), STRENGTHS[best]


def _tfidf(training: Sequence[str], *others: Sequence[str]) -> list[Any]:
    """Sparse matrices of texts, with the words and pairs of words of the first list as columns."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    return [vectorizer.fit_transform(training), *(vectorizer.transform(texts) for texts in others)]
