"""Synthetic tasks that tell mechanisms apart: what `saccade compare --task` trains small models on."""

from __future__ import annotations

from . import figure, tables
from .contenders import Attention, Contender, Network
from .copying import Copy, Duplication
from .everyone import named, refused, usual
from .examples import UNASKED, Examples, Task
from .model import Reader, Shape
from .recall import Induction, Needle, Recall
from .records import Case, Row, append, as_dict, load, missing
from .running import cases, go_through, measure
from .tables import TASKS
from .training import Budget, Outcome, run

__all__ = [
    "TASKS",
    "UNASKED",
    "Attention",
    "Budget",
    "Case",
    "Contender",
    "Copy",
    "Duplication",
    "Examples",
    "Induction",
    "Needle",
    "Network",
    "Outcome",
    "Reader",
    "Recall",
    "Row",
    "Shape",
    "Task",
    "append",
    "as_dict",
    "cases",
    "figure",
    "go_through",
    "load",
    "measure",
    "missing",
    "named",
    "refused",
    "run",
    "tables",
    "usual",
]
