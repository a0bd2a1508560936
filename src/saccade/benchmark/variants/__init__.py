"""Measures which attention to choose; the implementation of `saccade compare`.

Mechanisms, sparse patterns and other layers are timed, their memory is measured and their outputs are compared with
exact attention on the same data. The results lead to a sentence of advice.
"""

from __future__ import annotations

from .data import ComparisonData, ProblemSizes, model_data, random_data, tensor_data
from .results import ApproximationError, ContenderResults, GradientReach, LengthResult, VariantComparison

__all__ = [
    "ApproximationError",
    "ComparisonData",
    "ContenderResults",
    "GradientReach",
    "LengthResult",
    "ProblemSizes",
    "VariantComparison",
    "model_data",
    "random_data",
    "tensor_data",
]
