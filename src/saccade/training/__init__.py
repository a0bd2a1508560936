"""Training language models on text. The command `saccade train` is a thin layer over this.

Begin with `run.py`, a whole run, and `loop.py`, its steps; `resume.py` continues one. Imports `models` and
`monitoring`.
"""

from __future__ import annotations

from .anomaly import find_anomaly
from .data import Corpus, read_texts, split_tail
from .evaluation import evaluate
from .language_run import LanguageRun, Reporter
from .loop import Diverged, Monitor, train
from .norms import gradient_norms
from .rising_rates import RangeTest, range_test
from .run import train_language_model
from .schedule import learning_rate
from .settings import EvaluationSettings, Execution, Settings
from .stopping import Stopped
from .windows import draw_windows, whole_windows

__all__ = [
    "Corpus",
    "Diverged",
    "EvaluationSettings",
    "Execution",
    "LanguageRun",
    "Monitor",
    "RangeTest",
    "Reporter",
    "Settings",
    "Stopped",
    "draw_windows",
    "evaluate",
    "find_anomaly",
    "gradient_norms",
    "learning_rate",
    "range_test",
    "read_texts",
    "split_tail",
    "train",
    "train_language_model",
    "whole_windows",
]
