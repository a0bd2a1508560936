"""Tasks on real data: train a model, test it beside a simple baseline, predict with it, each in one line.

    run = saccade.tasks.train("classify", "reviews.csv", out="runs/reviews")
    print(saccade.tasks.test(run, "test.csv"))
    saccade.tasks.predict(run, ["what a film"])

Begin with `_task.py`, what a task is, and `classify.py`, one of them. Imports `training` and `models`.
"""

from __future__ import annotations

from ._predicting import predict
from ._task import Baseline, Recipe, Task
from ._testing import TestReport, test
from ._training import TrainedRun, train
from .answer import Answer
from .classify import Classify
from .tag import Tag

__all__ = [
    "Answer",
    "Baseline",
    "Classify",
    "Recipe",
    "Tag",
    "Task",
    "TestReport",
    "TrainedRun",
    "predict",
    "test",
    "train",
]
