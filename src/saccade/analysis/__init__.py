"""Studying a model over many texts: what its heads do, how that spreads, and what each layer knows.

Begin with `_corpus.py`. Imports `inspection`, which knows one text, and what that stands on.
"""

from __future__ import annotations

from ._compare import Change, Comparison, compare
from ._coreference import Coreference, study_coreference
from ._corpus import ROLES, CorpusScores, study_corpus
from ._labels import Labelled, read_labels
from ._mentions import Document, Mention, read_coreference
from ._numbers import COLUMNS, as_numbers, as_rows
from ._probe import Knows, Probe, study_probe
from ._scores import SCORES
from ._syntax import Syntax, study_syntax
from ._tally import Answer, Tally
from ._texts import Text, cut, read_files
from ._treebank import Sentence, Word, read_treebank

__all__ = [
    "COLUMNS",
    "ROLES",
    "SCORES",
    "Answer",
    "Change",
    "Comparison",
    "Coreference",
    "CorpusScores",
    "Document",
    "Knows",
    "Labelled",
    "Mention",
    "Probe",
    "Sentence",
    "Syntax",
    "Tally",
    "Text",
    "Word",
    "as_numbers",
    "as_rows",
    "compare",
    "cut",
    "read_coreference",
    "read_files",
    "read_labels",
    "read_treebank",
    "study_coreference",
    "study_corpus",
    "study_probe",
    "study_syntax",
]
