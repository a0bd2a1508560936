"""`saccade.tasks.prune`: heads removed from the model of a run, ranked by the loss of its task."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....see.attribution import HeadImportance, head_importance
from ....see.attribution._importance_result import kept_count
from ...models import Model
from ...models.decoder_lm.checkpoint import CARD, write_text
from ...pruning import PrunedLayer, Pruning, prune as prune_model
from ...pruning._heads import Heads
from ...pruning._layers import attention_layers, prunable
from ...pruning._report import all_layers, as_json, parameters_line
from ...pruning._timing import ROUNDS, ForwardTimes, forward_times
from ...training import Reporter
from ...training.language.card import card
from ...training.run_folder.layout import OURS, TASK, check_output, clear, lock_existing
from .._example_task import Batch, ExampleTask, judged_batches
from .._runs._request import TaskRun, read_data, task_run
from .._runs._run_folder import TaskFile, check_elsewhere, read_task_file
from .._runs._training import SETTINGS, TrainedRun, check_options, import_required, train_requested
from .._temporary import temporary_folder
from ._worth import KEEP_MORE, TRAIN_AGAIN, fewer, least, loss_and_gain

RANKING = 512  # examples that rank the heads, at most
LENGTHS = ("steps", "epochs", "minutes")
Told = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class PrunedRun:
    r"""The result of `prune`: a run before and after heads were removed.

    Attributes:
        run: the pruned run.
        pruning: the report of `saccade.prune`.
        layers: all attention layers, unchanged ones included.
        metrics: of the task, on the validation data: "before", "removed", and "trained" if it was trained again.
        judged: the number of validation examples.
        forward: the time of a forward on a batch of them, before and after.
        verdict: if the metric got worse by a larger share than that of the parameters saved: sentences that pruning
            was not worth it, and what would be. Otherwise empty.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        ...     pruned = saccade.tasks.prune(run, folder + "/pruned", keep=1)
        >>> [layer.heads for layer in pruned.layers]  # before and after
        [(2, 1)]
    """

    run: TrainedRun
    pruning: Pruning
    layers: tuple[PrunedLayer, ...]
    metrics: dict[str, dict[str, float]]
    judged: int
    forward: ForwardTimes = dataclasses.field(repr=False)
    verdict: tuple[str, ...] = ()

    def lines(self) -> list[tuple[str, str, str]]:
        """Name, values and remark of each number, for people."""
        remark = f"before -> heads removed{' -> trained on' * ('trained' in self.metrics)}, {self.judged:,} examples"
        metrics = [
            (name, " -> ".join(f"{scores[name]:.4f}" for scores in self.metrics.values()), remark)
            for name in self.metrics["before"]
        ]
        return [parameters_line(self.pruning), *metrics, self.forward.line()]

    def as_json(self) -> dict[str, Any]:
        """The result as plain values for JSON."""
        return {
            **as_json(Pruning(self.layers, self.pruning.parameters, self.pruning.note)),
            "metrics": self.metrics,
            "examples": self.judged,
            "forward": self.forward.as_json(),
            "verdict": list(self.verdict),
        }

    def __str__(self) -> str:
        lines = ["  ".join(line) for line in self.lines()]
        return "\n".join([*lines, *([self.pruning.note] if self.pruning.note else []), *self.verdict])


def prune(
    run: TrainedRun | str | Path,
    out: str | Path,
    *,
    keep: float | None = None,
    heads: Heads | None = None,
    data: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> PrunedRun:
    r"""Remove attention heads from a run's model for good; the result is a run of the same task, in another folder.

    Heads are ranked by the size of the derivative of the task's loss by a factor on each, over at most 512 training
    examples (`saccade.head_importance`, `saccade.pruning.choose_heads`). The metrics are those on the validation data.
    Half of the heads saves half of attention's work, and nothing in the feed-forward layers.

    Args:
        run: of `train` or `distill`, or its folder.
        out, overwrite, resume, reporter: as in `train`.
        keep: how many heads stay (an int), or as which share of all.
        heads: the heads to remove, as in `saccade.prune`, instead of `keep`.
        data: used for ranking, metrics and training; None: the data that the run learned from, split as it was.
        options: with `steps`, `epochs` or `minutes` the model is trained again, by the settings of `train`.

    Raises:
        TypeError: an unknown option.
        FileNotFoundError, FileExistsError, ValueError: what is wrong with the input; as of `saccade.prune`.
        Diverged, Stopped: as of `saccade.training.run_training`.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        ...     pruned = saccade.tasks.prune(run, folder + "/pruned", keep=0.5)
        >>> list(pruned.metrics)
        ['before', 'removed']
    """
    wanted = PruneRequest(run.folder if isinstance(run, TrainedRun) else Path(run), Path(out), keep, heads)
    return without_heads(wanted, data, options, overwrite=overwrite, resume=resume).finished(reporter)


@dataclasses.dataclass(frozen=True)
class PruneRequest:
    """The heads to remove from a run: `keep` or `heads`, see `prune`."""

    folder: Path
    out: Path
    keep: float | None
    heads: Heads | None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.heads is None):
            given = "neither" if self.heads is None else "both"
            raise ValueError(f"keep, heads: expected how many heads stay, or those that go, got {given}")


def without_heads(
    wanted: PruneRequest,
    data: str | Path | None,
    options: Mapping[str, Any],
    *,
    overwrite: bool = False,
    resume: bool = False,
    progress: Told = lambda what, done, total: None,
) -> HeadsRemoved:
    """`prune` until training would begin; `progress` gets the current step, how much of it is done, and its total."""
    learns = _checked(options)
    if resume and not learns:
        raise ValueError(f"resume: continues training; give one of {', '.join(LENGTHS)}, too")
    check_elsewhere(wanted.out, wanted.folder)
    if not resume:
        check_output(wanted.out, overwrite)
    task, source, training, judged = _data(wanted.folder, data)
    model, judge = task.open_model(wanted.folder), _Judge(task, judged)
    metrics, whole, layers = {"before": judge.scores(model)}, copy.deepcopy(model), attention_layers(model)
    ranked, chosen = None, wanted.heads
    if wanted.keep is not None:
        ranked = _ranked(task, model, training, wanted.keep, progress)
        chosen = least(model, ranked, wanted.keep)
    assert chosen is not None
    pruning = prune_model(model, chosen)
    metrics["removed"] = judge.scores(model)
    layers_now = all_layers(layers, attention_layers(model), pruning)
    forward = judge.times(whole, model, progress)
    lines = () if learns else _verdict(task, whole, ranked, pruning, metrics, judge)
    made = PrunedRun(TrainedRun(wanted.out, task, model), pruning, layers_now, metrics, len(judged), forward, lines)
    gone = sum(len(layer.removed) for layer in pruning.layers)
    run = task_run(
        source,
        training,
        judged,
        wanted.out,
        task.tuning,
        options if learns else {"steps": 1},
        overwrite=overwrite,
        resume=resume,
        origin=f"{wanted.folder} without {gone} heads",
    )
    return HeadsRemoved(made, run, judge, learns)


@dataclasses.dataclass(frozen=True)
class HeadsRemoved:
    """A model without the heads, before anything is written.

    Attributes:
        made: the result so far.
        run: the request to train it further.
        learns: whether to train it further.
    """

    made: PrunedRun
    run: TaskRun
    judge: _Judge = dataclasses.field(repr=False)
    learns: bool

    def finished(self, reporter: Reporter | None = None) -> PrunedRun:
        """Train the model further, if it `learns`, and write its folder."""
        with _without_note():
            if not self.learns:
                self._write()
                return self.made
            trained = self._trained(reporter)
        metrics = {**self.made.metrics, "trained": self.judge.scores(trained.model)}
        why = loss_and_gain(self.run.task, metrics["before"], metrics["trained"], self.made.pruning.parameters)
        lines = (f"not worth it: {why}", KEEP_MORE) if why else ()
        return dataclasses.replace(self.made, run=trained, metrics=metrics, verdict=lines)

    def _trained(self, reporter: Reporter | None) -> TrainedRun:
        began, start = time.perf_counter(), temporary_folder()
        try:
            self.made.run.model.save(start)
            return train_requested(dataclasses.replace(self.run, initial=str(start)), reporter, began)
        finally:
            shutil.rmtree(start, ignore_errors=True)

    def _write(self) -> None:
        """Write the run's folder, without files of an earlier run."""
        out = self.run.out
        lock = lock_existing(out, ours=self.run.overwrite)
        try:
            if out.is_dir():
                clear(out)
                for name in OURS:
                    (out / name).unlink(missing_ok=True)
            self.made.run.model.save(out)
            write_text(out / TASK, self.run.source.to_json())
            rows = {name: f"{values} ({remark})" for name, values, remark in self.made.lines()}
            sentence = f"A model of `saccade train {self.run.task_name}`: {self.run.origin}."
            write_text(out / CARD, card(out, sentence, rows))
        finally:
            if lock is not None:
                lock.close()


def _checked(options: Mapping[str, Any]) -> bool:
    """Whether options ask for further training. Raises errors of options."""
    check_options("prune", options, SETTINGS)
    given = [name for name, value in options.items() if value is not None]
    learns = any(name in LENGTHS for name in given)
    if given and not learns:
        raise ValueError(f"{given[0]}: sets how the model is trained again; give one of {', '.join(LENGTHS)}, too")
    return learns


def _data(folder: Path, data: str | Path | None) -> tuple[ExampleTask, TaskFile, Sequence[Any], Sequence[Any]]:
    """The task of a run, the source of its data, the training examples and the validation examples."""
    source = read_task_file(folder)
    if not isinstance(source.task, ExampleTask):
        why = "are joined without a projection" if source.task.name == "graph" else "`saccade.prune` removes"
        raise ValueError(f"{folder}: is a run of {source.task.name}, whose heads {why}")
    import_required(type(source.task))
    path, validation = (source.data, source.validation) if data is None else (Path(data), None)
    changed = source.changed() if data is None else None
    if changed is not None:
        raise ValueError(f"{folder}: {changed}; give other data")
    data_read = read_data(source.task, path, validation, source.seed, source.share, fit=False)
    return source.task, *data_read


class _Judge:
    """Metrics and times on the same examples before and after."""

    def __init__(self, task: ExampleTask, data: Sequence[Any]):
        self._task, self._data = task, data

    def scores(self, model: Model) -> dict[str, float]:
        return self._task.scores(self._task.predict(model, self._data), self._data)

    def times(self, before: Model, after: Model, progress: Told) -> ForwardTimes:
        """Times of a batch of the longest examples."""
        items = self._task.encode(after, self._data)
        _, batch = next(judged_batches(self._task, after, items))
        step = itertools.count(1)
        return forward_times(
            before,
            after,
            [batch],
            lambda: progress("measuring the time", next(step), ROUNDS + 1),
            call=self._task.forward,
            size=self._task.counted,
        )


def _ranked(task: ExampleTask, model: Model, training: Sequence[Any], keep: float, progress: Told) -> HeadImportance:
    """The importance of each head, with one example a batch, so that derivatives of opposite sign do not cancel."""
    heads = sum(layer.heads for layer in prunable(model))
    if kept_count(keep, heads) == heads:
        raise ValueError(f"keep: at {keep} every head stays")
    chosen = np.linspace(0, len(training) - 1, min(RANKING, len(training))).astype(int)
    items = task.encode(model, [training[n] for n in chosen])
    batches = [task.collate(model, [item]) for item in items]

    def loss(model: Any, batch: Batch) -> Any:
        return task.loss(task.forward(model, batch), batch, learning=False)

    return head_importance(model, batches, loss, progress=lambda done, total: progress("ranking heads", done, total))


def _verdict(
    task: ExampleTask,
    whole: Model,
    ranked: HeadImportance | None,
    pruning: Pruning,
    metrics: Mapping[str, dict[str, float]],
    judge: _Judge,
) -> tuple[str, ...]:
    """Lines that explain that pruning was not worth it, and what would be; empty if it was worth it."""
    why = loss_and_gain(task, metrics["before"], metrics["removed"], pruning.parameters)
    if not why:
        return ()
    better = ""
    if ranked is not None:
        gone = sum(len(layer.removed) for layer in pruning.layers)
        keep = 1 - gone / sum(layer.heads for layer in prunable(whole))
        better = fewer(task, whole, ranked, keep, metrics["before"], judge.scores)
    return (f"not worth it: {why}", *([better] if better else []), TRAIN_AGAIN)


@contextlib.contextmanager
def _without_note() -> Iterator[None]:
    """A block without the warning that transformers cannot load the folder: the result says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="transformers cannot load the folder")
        yield
