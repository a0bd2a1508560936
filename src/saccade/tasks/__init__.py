"""Tasks on real data: train a model, test it beside a simple baseline, predict with it, each in one line.

    run = saccade.tasks.train("classify", "reviews.csv", out="runs/reviews")
    print(saccade.tasks.test(run, "test.csv"))
    saccade.tasks.predict(run, ["what a film"])

Begin with `_task.py`, what a task is, and `classify.py`, one of them. Imports `training`, `pruning` and `models`.
"""

from __future__ import annotations

from ._distill import distill
from ._observing import ObservedInput, observe, reads_no_text
from ._predicting import predict
from ._prune import PrunedRun, prune
from ._search import SearchReporter, search
from ._search_result import SearchResult
from ._seeds import SeedsReport, test_seeds
from ._several_labels import ClassifySeveral
from ._space import Between, OneOf
from ._task import Baseline, Recipe, Task
from ._testing import TestReport, test
from ._training import TrainedRun, train
from ._trials import Trial
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
    "Between",
    "Classify",
    "ClassifyImages",
    "ClassifyNodes",
    "ClassifySeveral",
    "Forecast",
    "Mlm",
    "ObservedInput",
    "OneOf",
    "PrunedRun",
    "Recipe",
    "SearchReporter",
    "SearchResult",
    "SeedsReport",
    "Speech",
    "Tag",
    "Task",
    "TestReport",
    "TrainedRun",
    "Translate",
    "Trial",
    "distill",
    "observe",
    "predict",
    "prune",
    "reads_no_text",
    "search",
    "test",
    "test_seeds",
    "train",
]
