"""`saccade.tasks.observe`: the attention calls of a run's model for an input that is not text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....see.monitoring import Observations
from ...training.run_folder.layout import task_of
from .._texts._text_task import TextTask
from ._registry import TASKS
from ._training import TrainedRun, open_run


class ObservedInput(NamedTuple):
    r"""Every attention call of a model on one input: `saccade.view(watched, words=words)` shows them.

    Attributes:
        watched: the calls, kept, as `saccade.watch` keeps them.
        words: what each token stands for: a patch of an image, a time in a sound, steps of a series, a node.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "power.csv")
        ...     _ = path.write_text("date,load\n" + "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 32)))
        ...     small = dict(past=8, horizon=2, patch=4, stride=4, layers=1, heads=2, width=8, hidden=8, steps=2)
        ...     run = saccade.tasks.train("forecast", path, folder + "/run", precision="no", **small)
        ...     watched, words = saccade.tasks.observe(run, path)
        >>> words  # two patches, counted back from the last row
        ['-7 to -4', '-3 to 0']
    """

    watched: Observations
    words: list[str]


def observe(run: TrainedRun | str | Path, inputs: str | Path, **options: Any) -> ObservedInput:
    r"""Run a run's model on one input and keep every attention call.

    For runs that read images, sounds, series or nodes; `saccade.look` and `saccade.view` read texts.

    Args:
        run: of `train`, or its folder.
        inputs: one input in text (a node's name, a file's), or the Path of a file, of which the first input is read.
        options: of the task, where the file differs from those of training: other columns.

    Raises:
        FileNotFoundError, ValueError: no run of a task; one that reads text; no such input; a graph of so many nodes
            that a matrix of all pairs is too large.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "power.csv")
        ...     _ = path.write_text("date,load\n" + "".join(f"2024-01-{day:02},{day}\n" for day in range(1, 32)))
        ...     small = dict(past=8, horizon=2, patch=4, stride=4, layers=1, heads=2, width=8, hidden=8, steps=2)
        ...     run = saccade.tasks.train("forecast", path, folder + "/run", precision="no", **small)
        ...     seen = saccade.tasks.observe(run, path)
        >>> len(seen.words)  # patches of the series
        2
    """
    opened = open_run(run, options)
    task = opened.task
    data: Sequence[Any] = task.read_observed(inputs) if isinstance(inputs, Path) else task.inputs([inputs])
    return ObservedInput(*task.observed(opened.model, data))


def reads_no_text(source: str | Path) -> bool:
    """Whether this is the folder of a run whose inputs are images, sounds, series or nodes."""
    folder = Path(source)
    kind = TASKS.get(task_of(folder) or "") if folder.is_dir() else None
    return kind is not None and not issubclass(kind, TextTask)
