"""Tasks on real data: train a model, test it beside a simple baseline, predict with it, each in one line.

    run = saccade.tasks.train("classify", "reviews.csv", out="runs/reviews")
    print(saccade.tasks.test(run, "test.csv"))
    saccade.tasks.predict(run, ["what a film"])

Begin with `_task.py`, what a task is, and `classify.py`, one of them. `_classes` to `_graphs` have what several tasks
share, `_runs` trains, tests and predicts, `_searching` and `_compression` build on runs. Imports `training`, `pruning`
and `models`.
"""

from __future__ import annotations

from .._task_options import Recipe
from ._classes._class_task import ClassTask
from ._compression._distill import distill
from ._compression._prune import PrunedRun as PrunedRun, prune
from ._example_task import ExampleTask
from ._runs._observing import ObservedInput as ObservedInput, observe, reads_no_text as reads_no_text
from ._runs._predicting import predict
from ._runs._seeds import SeedsReport, test_seeds
from ._runs._testing import TestReport, test
from ._runs._training import TrainedRun, train
from ._searching._result import SearchResult
from ._searching._search import SearchReporter as SearchReporter, search
from ._searching._trials import Trial as Trial
from ._several_labels import ClassifySeveral as ClassifySeveral
from ._space import Between, OneOf
from ._task import Baseline, Task
from ._texts._text_task import TextTask
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
    "ClassTask",
    "Classify",
    "ClassifyImages",
    "ClassifyNodes",
    "ExampleTask",
    "Forecast",
    "Mlm",
    "OneOf",
    "Recipe",
    "SearchResult",
    "SeedsReport",
    "Speech",
    "Tag",
    "Task",
    "TestReport",
    "TextTask",
    "TrainedRun",
    "Translate",
    "distill",
    "observe",
    "predict",
    "prune",
    "search",
    "test",
    "test_seeds",
    "train",
]
