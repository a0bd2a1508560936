"""Simple models beside the trained ones, from scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # C, the inverse of the regularisation

Labelled = tuple[Sequence[str], np.ndarray]
"""Texts and the numbers of their classes."""


def tfidf_regression(training: Labelled, validation: Labelled, texts: Sequence[str]) -> tuple[np.ndarray, float]:
    """Logistic regression on words and pairs of words, weighed by TF-IDF.

    It learns from the training examples alone; C is the one of `STRENGTHS` that is right most often on the validation
    examples (of equally good ones the smallest).

    Returns:
        The probabilities (N, K) of the classes of `texts`, and C.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    known = vectorizer.fit_transform(training[0])
    judged = vectorizer.transform(validation[0])
    models = [LogisticRegression(C=strength, max_iter=1000).fit(known, training[1]) for strength in STRENGTHS]
    right = [float((model.predict(judged) == validation[1]).mean()) for model in models]
    best = int(np.argmax(right))
    return models[best].predict_proba(vectorizer.transform(texts)), STRENGTHS[best]
