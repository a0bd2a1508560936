"""`saccade.tasks.distill`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models import Model
from ...training import Reporter
from .._classes._class_task import ClassTask
from .._example_task import ExampleTask
from .._runs._registry import TASKS
from .._runs._request import TaskRun, read_data, task_run
from .._runs._run_folder import check_elsewhere, read_task_file
from .._runs._training import SETTINGS, TrainedRun, check_options, import_required, train_requested
from ._distillation import Distillation, Teaching
from ._student import Student

TEACHING = {field.name for field in dataclasses.fields(Teaching)}


def distill(
    teacher: TrainedRun | str | Path,
    student: str | Path | Mapping[str, Any],
    data: str | Path,
    out: str | Path,
    *,
    validation: str | Path | None = None,
    unlabelled: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> TrainedRun:
    r"""Train a smaller model on a trained one's outputs, and keep the best weights in a folder, a run of the same task.

    The loss is (1 - weight) times the task's own plus weight T² KL(teacher / T || student / T) of the outputs (Hinton
    et al., "Distilling the Knowledge in a Neural Network", 2015). Everything else is as in `train`.

    `hidden` adds the distance of last hidden states: 1 - cos, or the squared difference after a learned projection
    where widths differ. `relations` adds the distance of the last layers' attention weights and of the likeness of
    their values (MiniLM, Wang et al. 2020); where head counts differ, both are split again (MiniLMv2).

    Args:
        teacher: a run of `answer`, `classify`, `image`, `mlm`, `speech` (of classes) or `tag`, or its folder.
        student: what differs from the teacher's configuration, such as {"layers": 2} or "layers=2,width=128" (`layers`,
            `width`, `heads`, `hidden`, and names of its config.json); the file of a whole config.json; or a run, a
            published model or a name on the hub to start from. A new student reads with the teacher's tokenizer or
            image processor. If only the number of layers is smaller, it begins with the teacher's weights, of evenly
            spaced blocks.
        data, validation: as the teacher's task reads them. Without `validation` and `share`, the teacher's file or its
            split validates.
        out, overwrite, resume, reporter: as in `train`.
        unlabelled: further inputs to learn from; in a task of classes, the teacher labels them.
        options: `weight`, `temperature`, `hidden` and `relations` of `Teaching`; those of the settings as in `train`,
            `epochs` and `share`; options of the task by which data are read, such as a column.

    Raises:
        TypeError: an unknown option.
        FileNotFoundError, FileExistsError, ValueError: what is wrong with the input: no run, a task whose outputs are
            no choices, a student that reads other tokens or has other labels.
        Diverged, Stopped: as of `saccade.training.run_training`.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        ...     student = saccade.tasks.distill(run, {"width": 4}, data, folder + "/student", steps=2)
        >>> sum(p.numel() for p in student.model.parameters()) < sum(p.numel() for p in run.model.parameters())
        True
    """
    began = time.perf_counter()
    how: dict[str, Any] = {"validation": validation, "unlabelled": unlabelled, "overwrite": overwrite, "resume": resume}
    run = distill_request(teacher, student, data, out, options, **how)
    return train_requested(run, reporter, began)


def distill_request(
    teacher: TrainedRun | str | Path,
    student: str | Path | Mapping[str, Any],
    data: str | Path,
    out: str | Path,
    options: Mapping[str, Any],
    *,
    validation: str | Path | None = None,
    unlabelled: str | Path | None = None,
    **how: Any,
) -> TaskRun:
    """The request of `distill`, with its data read; `how` as in `TaskRun`."""
    options = {name: value for name, value in options.items() if value is not None}
    teaching = Teaching(**{name: options.pop(name) for name in TEACHING & options.keys()})
    wanted, unlabelled = Student.of(student), None if unlabelled is None else Path(unlabelled)
    folder = teacher.folder if isinstance(teacher, TrainedRun) else Path(teacher)
    check_elsewhere(Path(out), folder)
    taught = read_task_file(folder)
    kind = _teachable(taught.task)
    reading = {name: options.pop(name) for name in {*kind.reading} & options.keys()}
    check_options("distill", options, TEACHING | SETTINGS | {"share", *kind.reading})
    kind = kind.changed(reading)
    import_required(type(kind))
    wanted.check_labels(kind.name, kind.label_names)
    # Opened anew: it moves to the student's device, and nothing of it learns.
    model = kind.open_model(folder)
    distillation = Distillation(folder, kind, model, wanted, teaching, unlabelled)
    # Split as the teacher's own data were, whatever the seed: it has learned the rest by heart.
    if validation is None and "share" not in options:
        validation = taught.validation
    share = options.pop("share", taught.share)
    source, training, judged = read_data(kind, data, validation, taught.seed, share, fit=False)
    training = [*training, *([] if unlabelled is None else _labelled(kind, model, unlabelled))]
    anew = wanted.initial is None and not wanted.blocks(model)
    return task_run(
        source,
        training,
        judged,
        out,
        kind.scratch if anew else kind.tuning,
        options,
        initial=wanted.initial,
        distillation=distillation,
        origin="" if wanted.initial else distillation.origin,
        **how,
    )


def _teachable(task: object) -> ExampleTask:
    """The task, if its model has logits of classes; otherwise ValueError."""
    if isinstance(task, ExampleTask) and task.teachable:
        return task
    name = getattr(task, "name", type(task).__name__)
    able = [name for name, kind in TASKS.items() if getattr(kind, "logits", None) not in (None, ExampleTask.logits)]
    raise ValueError(
        f"teacher: is a run of {name}, without outputs that a student can imitate; expected a run of "
        f"{', '.join(sorted(able))}"
    )


def _labelled(task: ExampleTask, teacher: Model, path: Path) -> list[Any]:
    """Inputs of a file, labelled by the teacher."""
    if not isinstance(task, ClassTask):
        raise ValueError(f"unlabelled: only of tasks whose examples have one class each, which {task.name} is not")
    inputs = [example for example in task.read_inputs(path) if not task.is_empty(example)]
    return task.labelled(inputs, task.predict(teacher, inputs))
