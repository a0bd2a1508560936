"""Whether removing heads was worth it, and which share of heads would be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from ....see.attribution import HeadImportance
from ....see.attribution._importance_result import kept_count
from ...models import Model
from ...pruning import choose_heads, prune
from ...pruning._heads import Heads
from ...pruning._layers import prunable
from .._task import Task, judging_metric

TRAIN_AGAIN = "steps, epochs or minutes train it again without the heads; `saccade distill` teaches a smaller model"
KEEP_MORE = "keep more heads, train it longer, or teach a smaller model with `saccade distill`"
_TRIES = 3  # each with half as many heads removed
Scores = Mapping[str, float]


def loss_and_gain(task: Task, before: Scores, after: Scores, parameters: tuple[int, int]) -> str:
    """Why pruning was not worth it: the metric got worse by a larger share than that of parameters saved; "" if not."""
    cost = task.cost(before)
    worse = (task.cost(after) - cost) / abs(cost) if cost else float(task.cost(after) > cost)
    if worse <= 1 - parameters[1] / parameters[0]:
        return ""
    return f"{_change(task, before, after, parameters)} ({worse:.1%} worse)"


def fewer(
    task: Task, whole: Model, ranked: HeadImportance, keep: float, before: Scores, scores: Callable[[Model], Scores]
) -> str:
    """The first of a few larger shares of heads that is worth it, as measured; "" if none is.

    Args:
        whole: the model with all heads.
        keep: the share that was not worth it.
        scores: the metrics of a model.
    """
    heads = sum(layer.heads for layer in prunable(whole))
    for halved in range(1, _TRIES + 1):
        share = round(1 - (1 - keep) / 2**halved, 3)
        if kept_count(share, heads) == heads:
            break
        model = copy.deepcopy(whole)
        parameters = prune(model, least(model, ranked, share)).parameters
        after = scores(model)
        if not loss_and_gain(task, before, after, parameters):
            return f"keep {share:g} would be: {_change(task, before, after, parameters)}"
    return ""


def least(model: Model, ranked: HeadImportance, keep: float) -> Heads:
    """The heads that matter least, of all but ``keep``, for `saccade.prune`."""
    return [(path, head) for path, numbers in choose_heads(model, ranked, keep).items() for head in numbers]


def _change(task: Task, before: Scores, after: Scores, parameters: tuple[int, int]) -> str:
    name = judging_metric(task, before)
    saved = 1 - parameters[1] / parameters[0]
    return f"{name} {before[name]:.4f} -> {after[name]:.4f} for {saved:.1%} fewer parameters"
