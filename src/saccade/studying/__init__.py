"""Studying a model over many texts: what its heads do, how that spreads, and what each layer knows."""

from __future__ import annotations

from ._compare import Change, Comparison, compare
from ._corpus import ROLES, CorpusScores, study_corpus
from ._scores import SCORES
from ._texts import Text, cut, read_files

__all__ = [
    "ROLES",
    "SCORES",
    "Change",
    "Comparison",
    "CorpusScores",
    "Text",
    "compare",
    "cut",
    "read_files",
    "study_corpus",
]
