"""Synthetic tasks that distinguish mechanisms: `saccade compare --task` trains small models on them."""

from __future__ import annotations

from . import figure, tables
from .catalogue import contender_named, refused_contenders, usual_contenders
from .contenders import AttentionBlocks, RecurrentNetwork, TaskContender
from .copying import Copy, Duplication
from .examples import UNASKED, Examples, SyntheticTask
from .model import ModelShape, SequenceModel
from .recall import Induction, Needle, Recall
from .records import FinishedRun, TrainingCase, append, as_dict, load, missing
from .running import cases, go_through, measure
from .tables import TASKS
from .training import TrainingBudget, TrainingOutcome, run

__all__ = [
    "TASKS",
    "UNASKED",
    "AttentionBlocks",
    "Copy",
    "Duplication",
    "Examples",
    "FinishedRun",
    "Induction",
    "ModelShape",
    "Needle",
    "Recall",
    "RecurrentNetwork",
    "SequenceModel",
    "SyntheticTask",
    "TaskContender",
    "TrainingBudget",
    "TrainingCase",
    "TrainingOutcome",
    "append",
    "as_dict",
    "cases",
    "contender_named",
    "figure",
    "go_through",
    "load",
    "measure",
    "missing",
    "refused_contenders",
    "run",
    "tables",
    "usual_contenders",
]
