"""One trainer for every task, and language models as the first of them. `saccade train` is a thin layer over this.

Begin with `run.py`, a whole run, and `loop.py`, its steps; `resume.py` continues one. A task plugs in as an `Objective`
(`objective.py`: what the loop trains) and a `PreparedRun` (`prepared.py`: what the folder gets); those of language
modelling are `language_objective.py` and `prepared_language.py`. Imports `models` and `monitoring`.
"""

from __future__ import annotations

from .anomaly import find_anomaly
from .data import Corpus, read_texts as read_texts, split_tail as split_tail
from .evaluation import evaluate as evaluate
from .language_objective import LanguageObjective
from .language_run import LanguageRun
from .loop import Diverged, Monitor, train
from .memory import TooLittleMemory
from .norms import gradient_norms
from .objective import Evaluation, Objective
from .prepared import PreparedRun as PreparedRun, Reporter
from .prepared_language import train_language_model
from .rising_rates import RangeTest as RangeTest, range_test
from .run import run_training as run_training
from .settings import EvaluationSettings, Execution, LanguageSettings, Settings, learning_rate as learning_rate
from .stopping import Stopped as Stopped
from .windows import draw_windows as draw_windows, whole_windows as whole_windows

__all__ = [
    "Corpus",
    "Diverged",
    "Evaluation",
    "EvaluationSettings",
    "Execution",
    "LanguageObjective",
    "LanguageRun",
    "LanguageSettings",
    "Monitor",
    "Objective",
    "Reporter",
    "Settings",
    "TooLittleMemory",
    "find_anomaly",
    "gradient_norms",
    "range_test",
    "train",
    "train_language_model",
]

RENAMED = {"carry_out": "run_training"}

TYPE_CHECKING = False
if not TYPE_CHECKING:
    from ...support._lazy_names import lazy_names

    __getattr__ = lazy_names(__name__, {}, RENAMED)
