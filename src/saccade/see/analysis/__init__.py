"""Models studied over many texts: what their heads do, how that varies, and what each layer encodes.

Begin with `_corpus.py`. Imports `inspection`, which reads one text.
"""

from __future__ import annotations

from ._compare import ModelComparison, ScoreChange as ScoreChange, compare
from ._coreference import Coreference, study_coreference
from ._corpus import ROLES, CorpusScores, study_corpus
from ._labels import LabelledSentence, read_labels
from ._mentions import Document, Mention, read_coreference
from ._numbers import COLUMNS as COLUMNS, as_numbers, as_rows
from ._probe import Probe, ProbeAccuracy as ProbeAccuracy, study_probe
from ._scores import SCORES
from ._syntax import Syntax, study_syntax
from ._tally import AnswerShare as AnswerShare, AnswerTally as AnswerTally
from ._texts import Text, cut, read_files
from ._treebank import Sentence, TreebankWord, read_treebank

__all__ = [
    "ROLES",
    "SCORES",
    "Coreference",
    "CorpusScores",
    "Document",
    "LabelledSentence",
    "Mention",
    "ModelComparison",
    "Probe",
    "Sentence",
    "Syntax",
    "Text",
    "TreebankWord",
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
