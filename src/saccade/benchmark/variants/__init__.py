"""Which attention to choose, measured: what `saccade compare` is made of.

Mechanisms, exact sparse patterns and other layers are timed and weighed at each length, held against exact attention on
the same data, and one sentence of advice is made of the numbers.
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
