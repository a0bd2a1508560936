"""The request of a run: data that are read, and complete settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..._task_options import Recipe
from ...models import Model
from ...training import EvaluationSettings, Execution, Objective, Settings
from ...training.prepared import check_one
from ...training.run_folder.resume import digest
from .._task import Task
from ._run_folder import TaskFile
from ._tuning import ALL, Tuning

DECAY, WARMUP = 0.01, 100
SHARE = 0.1  # of the data, to validate on


class TaughtBy(Protocol):
    """A teacher in distillation (`.._compression`)."""

    @property
    def told(self) -> str:
        """The teacher and its settings, in a line."""

    def described(self) -> dict[str, Any]:
        """Everything that decides the result, for the run's description."""

    def new_student(self) -> Model:
        """A new model to train."""

    def objective(self, plain: Objective, examples: Sequence[Any]) -> Objective:
        """The objective to train instead of `plain`. ValueError if student and teacher do not fit together."""


@dataclasses.dataclass(frozen=True)
class TaskRun:
    """The request to train a task's model.

    Args:
        task: fitted to the training data.
        source: of the data; it is written beside the model.
        training, validation: the examples.
        out: the folder to write; one that exists raises an error unless `overwrite`.
        settings: of the training loop.
        initial: a run's folder, a published model's, or a name on the hub, from whose weights and tokenizer the run
            starts; None starts from random weights.
        tuning: which of these weights are trained.
        resume: continue the run in `out` where it stopped.
        distillation: the teacher whose outputs the model learns beside the labels; None: labels only.
        origin: the start of the run as it is printed; "" is `initial`, or random weights.
        counted: the settings for a number of examples; None: `settings`, whatever the number.
    """

    task: Task
    source: TaskFile
    training: Sequence[Any]
    validation: Sequence[Any]
    out: Path
    settings: Settings
    initial: str | None = None
    tuning: Tuning = ALL
    overwrite: bool = False
    resume: bool = False

    distillation: TaughtBy | None = None
    origin: str = ""
    counted: Callable[[int], Settings] | None = None

    def __post_init__(self) -> None:
        check_one(self)
        if self.tuning and self.initial is None:
            raise ValueError(
                "initial: missing; last and lora select weights of a checkpoint to train, so pass a checkpoint"
            )

    @property
    def task_name(self) -> str:
        return self.task.name

    @property
    def start(self) -> str:
        """The initial weights, and which of them are trained, as text."""
        begun = self.origin or self.initial or "random weights"
        return f"{begun}; {self.tuning} learn" if self.tuning else begun

    @property
    def recipe(self) -> Recipe:
        """The default settings."""
        return self.task.scratch if self.initial is None else self.task.tuning

    def read_by(self, model: Model) -> TaskRun:
        """The run over the examples as the model reads them, with the settings for their number."""
        training, validation = (self.task.read_by(model, part) for part in (self.training, self.validation))
        settings = self.settings
        if self.counted is not None:
            # The precision may be a checkpoint's, and the minutes those that a search has left.
            execution, minutes = settings.execution, settings.minutes
            settings = dataclasses.replace(self.counted(len(training)), execution=execution, minutes=minutes)
        return dataclasses.replace(self, training=training, validation=validation, settings=settings)


def read_data(
    task: Task, data: str | Path, validation: str | Path | None, seed: int, share: float, *, fit: bool = True
) -> tuple[TaskFile, Sequence[Any], Sequence[Any]]:
    """The task fitted to its training data, the training examples, and the validation examples.

    Args:
        validation: a file of its own; None splits a share off by the seed.
        fit: whether the task learns its classes from them; else it has learned them before.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share: of the data to validate on, must be above 0 and below 1, got {share}")
    data, validation = Path(data), None if validation is None else Path(validation)
    examples = task.read(data)
    if validation is None:
        training, judged = task.split(examples, share, seed)
        task = task.fitted(training) if fit else task
        if not judged:
            raise ValueError(f"{data}: {len(examples)} examples are too few to split; give --validation")
    else:
        training, task = examples, task.fitted(examples) if fit else task
        judged = task.read(validation)
        if not judged:
            raise ValueError(f"{validation}: no example to validate on")
    # Absolute paths: a test may run in another folder.
    data, validation = data.resolve(), None if validation is None else validation.resolve()
    digests = {str(path): digest(task.files(path)) for path in (data, validation) if path is not None}
    return TaskFile(task, data, validation, digests, seed, share), training, judged


def task_run(
    source: TaskFile,
    training: Sequence[Any],
    validation: Sequence[Any],
    out: str | Path,
    recipe: Recipe,
    given: Mapping[str, Any],
    **more: Any,
) -> TaskRun:
    """The run with the given settings, and the recipe's for all others; `more` as in `TaskRun`."""
    counted = functools.partial(settings_for, recipe, given=given)
    settings = counted(len(training))
    return TaskRun(source.task, source, training, validation, Path(out), settings, counted=counted, **more)


def settings_for(recipe: Recipe, count: int, given: Mapping[str, Any]) -> Settings:
    """The settings of a run over `count` examples: those given, by their options, and the recipe where none is.

    Without `steps` and `minutes` a run takes the recipe's epochs; with `minutes` alone, as many as there is time for.

    ValueError for `epochs` with `steps`, or for less than one.
    """
    options = {name: value for name, value in given.items() if value is not None}
    names = {kind: {field.name for field in dataclasses.fields(kind)} for kind in (Execution, EvaluationSettings)}
    execution = Execution(**{name: options.pop(name) for name in names[Execution] & options.keys()})
    looks = {name: options.pop(name) for name in names[EvaluationSettings] & options.keys()}
    batch = options.get("batch", recipe.batch)
    options["batch"] = batch = count if batch is None else min(batch, count)
    epoch = count // max(batch, 1)
    epochs = options.pop("epochs", None)
    if epochs is not None and "steps" in options:
        raise ValueError(f"epochs, steps: give one of them, got {epochs} and {options['steps']}")
    if epochs is not None and epochs < 1:
        raise ValueError(f"epochs: must be at least 1, got {epochs}")
    if epochs is None and not {"steps", "minutes"} & options.keys():
        epochs = recipe.epochs
    options.setdefault("steps", None if epochs is None else epochs * epoch)
    # Not a tenth of `steps`: a run that is over may go on with more of them.
    warmup = min(WARMUP, recipe.epochs * epoch // 10)
    defaults = {"rate": recipe.rate, "decay": DECAY, "warmup": warmup}
    looks = {"every": recipe.every or epoch, "patience": recipe.patience, **looks}
    return Settings(**{**defaults, **options}, execution=execution, looks=EvaluationSettings(**looks))


def split_again(source: TaskFile) -> tuple[Sequence[Any], Sequence[Any]]:
    """The training and validation examples of a run, read again."""
    examples = source.task.read(source.data)
    if source.validation is not None:
        return examples, source.task.read(source.validation)
    return source.task.split(examples, source.share, source.seed)
