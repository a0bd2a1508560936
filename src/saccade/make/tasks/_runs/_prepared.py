"""A run of a task with its model, as the training loop and the writer need it, and its model card."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....support._numbers import named_values
from ....support._restored import seeded
from ...models import Model
from ...models.decoder_lm.checkpoint import write_text
from ...models.model import COMPANIONS
from ...training import Evaluation, PreparedRun
from ...training.language.card import card, machine
from ...training.prepared import COMMON, CurveEntry
from ...training.run_folder.layout import TASK
from ...training.run_folder.resume import LatestCheckpoint, check_same, settings_described
from ...training.verdict import UNTRAINED
from .._task import Task, judging_metric, sampled
from .._temporary import from_small_files, kept_while_used, small_files, temporary_folder
from ._request import TaskRun
from ._run_folder import weights_digest
from ._tuning import merged, parameter_count


class PreparedTaskRun(PreparedRun):
    """A task, its examples and its model.

    Args:
        run: the request.
        checkpoint: that it continues from.
    """

    def __init__(self, run: TaskRun, model: Model, checkpoint: LatestCheckpoint | None = None):
        examples = [*run.training, *run.validation] if run.distillation is not None else []
        self.run = run = run.read_by(model)
        self.settings, self.trained, self.state = run.settings, model, None
        self.kept = {"files": small_files(model)}
        if checkpoint is None or checkpoint.path is None:
            self.described = description(run)
        else:
            self.described = description(run, checkpoint.state["run"]["from"])
            check_same(self.described, checkpoint.state, checkpoint.path)
            self.state = checkpoint.state
        run.tuning.apply(model)
        self.objective = run.task.objective(model, run.training, run.validation, run.settings)
        if run.distillation is not None:
            self.objective = run.distillation.objective(self.objective, examples)

    @classmethod
    def of(cls, run: TaskRun, checkpoint: LatestCheckpoint | None) -> PreparedTaskRun:
        """Make the model or restore it. Raises errors about the input."""
        torch.manual_seed(run.settings.seed)
        if checkpoint is not None and checkpoint.path is not None:
            return cls(run, from_small_files(checkpoint.state["files"]), checkpoint)
        if run.initial is None:
            taught = run.distillation
            return cls(run, run.task.new_model(run.training) if taught is None else taught.new_student())
        return cls(run, _with_own_folder(_opened(run.task, run.initial)))

    @property
    def introduction(self) -> list[str]:
        run, count = self.run, parameter_count(self.trained)
        anew = any(name.startswith("head.") for name in self.trained.report.initialised)
        return [
            f"{run.task_name}: {self.trained.family.name} of {count:,} parameters, from {run.start}"
            + "; its head starts with random weights" * anew,
            *([] if run.distillation is None else [f"taught by {run.distillation.told}"]),
            f"{len(run.training):,} examples to train on, {len(run.validation):,} to validate",
        ]

    def conclusion(self, stored: Evaluation) -> str:
        scored = self.run.task.scored(len(self.run.validation))
        return f"best weights, {scored}: {named_values({**stored.metrics, 'loss': stored.loss}.items())}"

    def verdict(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation) -> list[str]:
        lines = super().verdict(curve, steps_done, stored)
        with seeded(self.settings.seed):
            return [*lines, *beside_simple(self.run, self.trained, stored, finished=not lines[0].startswith(UNTRAINED))]

    def as_stored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = merged({name: tensor.detach() for name, tensor in weights.items()})
        return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in whole.items()}

    def save(self, weights: dict[str, Tensor], name: str) -> None:
        # Not the model in training, which may be sharded, or newer than these weights.
        model = from_small_files(self.kept["files"], empty=True)
        model.load_state_dict(merged(weights), assign=True)
        model.save(self.run.out, weights=name)
        write_text(self.run.out / TASK, self.run.source.to_json())

    def card(self, curve: list[CurveEntry], steps_done: int, stored: Evaluation | None) -> str:
        return task_card(self.run, self.trained, curve, steps_done, stored)

    def stored(self) -> tuple[Model, Evaluation]:
        best = self.run.task.open_model(self.run.out).to(self.trained.device)
        return best, self.objective.evaluate(best)


def _opened(task: Task, initial: str) -> Model:
    """The model to start from. ValueError for one that does not fit the task."""
    try:
        return task.open_model(initial)
    except ValueError as error:
        raise ValueError(f"initial: {initial} cannot be the start of {task.name} ({error})") from None


def _with_own_folder(model: Model) -> Model:
    """The model with a copy of its tokenizer's files: the original folder may be removed during training."""
    assert model.folder is not None
    folder = temporary_folder()
    for name in COMPANIONS:
        if (model.folder / name).is_file():
            shutil.copyfile(model.folder / name, folder / name)
    model.folder = folder
    return kept_while_used(model, folder)


def description(run: TaskRun, known: str | None = None) -> dict[str, Any]:
    """Everything that decides what a run learns: settings, the task's options, and what it reads.

    Args:
        known: the digest of the weights that the run began with, where a checkpoint has it.
    """
    source = run.source
    options = {name: value for name, value in vars(run.task).items() if name not in run.task.learned}
    named = {"training data": source.digests[str(source.data)]}
    if source.validation is not None:
        named["validation data"] = source.digests[str(source.validation)]
    initial = "random weights"
    if run.initial is not None:
        initial = _initial_digest(run.initial, known)
    return {
        "task": run.task_name,
        **settings_described(run.settings),
        **options,
        "share": source.share,
        "from": initial,
        **dataclasses.asdict(run.tuning),
        **({} if run.distillation is None else run.distillation.described()),
        **named,
    }


def _initial_digest(source: str, known: str | None) -> str:
    """The digest of a run's first weights: of the files, or the one in the checkpoint if the files are gone."""
    try:
        return weights_digest(source)
    except (FileNotFoundError, ValueError):
        if known is None or Path(source).expanduser().exists():
            raise
        return known


def beside_simple(run: TaskRun, model: Model, stored: Evaluation, *, finished: bool) -> list[str]:
    """Lines of a verdict, of the same validation examples as the metrics of `stored`.

    Args:
        finished: whether no other line says that the model is untrained.
    """
    task, most = run.task, run.task.compared
    training, judged, looked = sampled(run.training, most), sampled(run.validation, most), task.looked(run.validation)
    mine, lines = task.cost(stored.metrics), []
    same = task.constant(model, training, looked)
    if same is not None:
        scores = task.scores(same.outputs, looked)
        metric = judging_metric(task, scores)
        line = f"{metric} {stored.metrics[metric]:.4f}; {same.name} has {scores[metric]:.4f}"
        lines.append(f"{UNTRAINED}: {line}" if finished and mine >= task.cost(scores) else line)
    try:
        baselines = task.quick_baselines(model, training, judged, looked)
    except ValueError as error:
        return [*lines, f"no simple model to compare with: {' '.join(str(error).split())}"]
    best = min(baselines, key=lambda baseline: task.cost(task.scores(baseline.outputs, looked)))
    scores = task.scores(best.outputs, looked)
    metric = judging_metric(task, scores)
    learned = f" of {len(training):,} of {len(run.training):,} examples" * (len(training) < len(run.training))
    better = "less good than this model" if mine < task.cost(scores) else "as good as this model or better"
    return [*lines, f"{best.name}, a simple model{learned}, has {metric} {scores[metric]:.4f}: {better}"]


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
