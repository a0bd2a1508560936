"""Whether probabilities mean what they say."""

from __future__ import annotations

import numpy as np

BINS = 15


def expected_calibration_error(probabilities: np.ndarray, truth: np.ndarray, bins: int = BINS) -> float:
    """The mean distance of confidence from accuracy, 0 at best:  sum_b n_b / N |accuracy_b - confidence_b|.

    Examples are put into bins of equal width by the probability of the class that is named, a bin with its upper end.
    Guo et al., "On Calibration of Modern Neural Networks" (2017), equation 3, with their 15 bins.

    Args:
        probabilities: (N, K).
        truth: (N,) numbers of classes.
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == truth
    places = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(places, weights=right - confidence, minlength=bins)  # n_b (accuracy_b - confidence_b)
    return float(np.abs(gaps).sum() / len(truth))
