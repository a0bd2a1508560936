"""The trainer for every task, with language models as the first task. `saccade train` calls it.

Begin with `run.py` (a whole run) and `loop.py` (its steps). A task plugs in as an `Objective` (`objective.py`: what
the loop trains) and a `PreparedRun` (`prepared.py`: what is written to the run's folder); those of language
models are in `language/`. What a run writes is in `run_folder/`. Imports `models` and `monitoring`.
"""

from __future__ import annotations

from .anomaly import find_anomaly
from .language.corpus import Corpus, read_texts as read_texts, split_tail as split_tail
from .language.evaluation import evaluate as evaluate
from .language.objective import LanguageObjective
from .language.prepared import train_language_model
from .language.request import LanguageRun
from .language.windows import draw_windows as draw_windows, whole_windows as whole_windows
from .loop import Diverged, Monitor, train
from .memory import TooLittleMemory
from .norms import gradient_norms
from .objective import Evaluation, Objective
from .prepared import PreparedRun as PreparedRun, Reporter
from .rising_rates import RangeTest as RangeTest, range_test
from .run import run_training as run_training
from .settings import EvaluationSettings, Execution, LanguageSettings, Settings, learning_rate as learning_rate
from .stopping import Stopped as Stopped

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
