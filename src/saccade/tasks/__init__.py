"""Tasks on real data: train a model, test it beside a simple baseline, predict with it, each in one line.

    run = saccade.tasks.train("classify", "reviews.csv", out="runs/reviews")
    print(saccade.tasks.test(run, "test.csv"))
    saccade.tasks.predict(run, ["what a film"])

Begin with `_task.py`, what a task is, and `classify.py`, one of them. Imports `training` and `models`.
"""

from __future__ import annotations

from ._predicting import predict
from ._seeds import SeedsReport, test_seeds
from ._task import Baseline, Recipe, Task
from ._testing import TestReport, test
from ._training import TrainedRun, train
from .answer import Answer
from .classify import Classify
from .forecast import Forecast
from .graph import ClassifyNodes
from .image import ClassifyImages
from .mlm import Mlm
from .speech import Speech
from .tag import Tag
from .translate import Translate

__all__ = [
    "Answer",
    "Baseline",
    "Classify",
    "ClassifyImages",
    "ClassifyNodes",
    "Forecast",
    "Mlm",
    "Recipe",
    "SeedsReport",
    "Speech",
    "Tag",
    "Task",
    "TestReport",
    "TrainedRun",
    "Translate",
    "predict",
    "test",
    "test_seeds",
    "train",
]
