"""What a run ends with: its model beside the same answer to every input, and beside a simple model."""

from __future__ import annotations

from ...models import Model
from ...training import Evaluation
from ...training.verdict import UNTRAINED
from .._task import sampled
from ._request import TaskRun


def beside_simple(run: TaskRun, model: Model, stored: Evaluation, *, finished: bool) -> list[str]:
    """Lines of a verdict, of the same validation examples as the metrics of `stored`.

    Args:
        finished: whether nothing says yet that the model is no result.
    """
    task, most = run.kind, run.kind.compared
    training, judged, looked = sampled(run.training, most), sampled(run.validation, most), task.looked(run.validation)
    mine, lines = task.cost(stored.metrics), []
    same = task.constant(model, training, looked)
    if same is not None:
        scores = task.scores(same.outputs, looked)
        metric = task.judged_by(scores)
        line = f"{metric} {stored.metrics[metric]:.4f}; {same.name} has {scores[metric]:.4f}"
        lines.append(f"{UNTRAINED}: {line}" if finished and mine >= task.cost(scores) else line)
    try:
        found = task.quick_baselines(model, training, judged, looked)
    except ValueError as error:
        return [*lines, f"no simple model to compare with: {' '.join(str(error).split())}"]
    best = min(found, key=lambda one: task.cost(task.scores(one.outputs, looked)))
    scores = task.scores(best.outputs, looked)
    metric = task.judged_by(scores)
    learned = f" of {len(training):,} of {len(run.training):,} examples" * (len(training) < len(run.training))
    better = "less good than this model" if mine < task.cost(scores) else "as good as this model or better"
    return [*lines, f"{best.name}, a simple model{learned}, has {metric} {scores[metric]:.4f}: {better}"]
