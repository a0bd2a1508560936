"""Training language models on text. The command `saccade train` is a thin layer over this."""

from __future__ import annotations

from .data import Corpus, read_texts, split_tail
from .evaluation import evaluate
from .loop import Settings, train
from .run import LanguageRun, train_language_model
from .schedule import learning_rate
from .windows import draw_windows, whole_windows

__all__ = [
    "Corpus",
    "LanguageRun",
    "Settings",
    "draw_windows",
    "evaluate",
    "learning_rate",
    "read_texts",
    "split_tail",
    "train",
    "train_language_model",
    "whole_windows",
]
