"""The model card of a run of a task."""

from __future__ import annotations

from ....support._numbers import named_values
from ...models import Model
from ...training import Evaluation
from ...training.language.card import card, machine
from ...training.prepared import COMMON, CurveEntry
from ._request import TaskRun
from ._tuning import parameter_count


def task_card(run: TaskRun, model: Model, curve: list[CurveEntry], steps_done: int, stored: Evaluation | None) -> str:
    """The card in Markdown: task, data, time, machine and validation metrics."""
    rows = {**_training(run, model, steps_done), **_result(run, curve, stored)}
    return card(run.out, f"A model trained by `saccade train {run.task_name}`.", rows)


def _training(run: TaskRun, model: Model, steps_done: int) -> dict[str, str]:
    settings, source = run.settings, run.source
    examples = steps_done * min(settings.batch, len(run.training))
    held = f"{source.share:.0%} of it" if source.validation is None else source.validation.name
    options = ", ".join(f"{name} {value}" for name, value in vars(run.task).items() if name not in run.task.learned)
    return {
        "model": f"{model.family.name}, {parameter_count(model):,} parameters",
        "options": options,
        "trained on": f"{source.data.name}: {len(run.training):,} examples",
        "validated on": f"{held}: {len(run.validation):,} examples",
        "steps": f"{steps_done:,}, {settings.batch} examples each, {examples / len(run.training):.1f} times the data",
        "starts from": run.start,
        **({} if run.distillation is None else {"taught by": run.distillation.told}),
        "optimizer": f"AdamW, rate {settings.rate:g}, warm-up {settings.warmup}, weight decay {settings.decay:g}, "
        f"betas 0.9 and {settings.beta2:g}, gradient norm at most {settings.clip:g}, "
        f"precision {settings.execution.precision}, seed {settings.seed}",
    }


def _result(run: TaskRun, curve: list[CurveEntry], stored: Evaluation | None) -> dict[str, str]:
    rows = {}
    if curve:
        metrics = {name: value for name, value in curve[-1].items() if name not in COMMON}
        rows["time"] = f"{curve[-1]['seconds'] / 60:.1f} min on {machine()}"
        rows["last look at validation"] = named_values(metrics.items())
    if stored is not None:
        rows[f"best weights, {run.task.scored(len(run.validation))}"] = named_values(stored.metrics.items())
    return rows
