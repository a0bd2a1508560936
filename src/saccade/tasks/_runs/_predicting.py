"""`saccade.tasks.predict`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._task import Task
from ._testing import write_picture
from ._training import TrainedRun, open_run


def predict(
    run: TrainedRun | str | Path,
    inputs: str | Path | Sequence[str],
    *,
    picture: str | Path | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """What a run's model says of each input, as plain values: of a text its label and the probabilities of all.

    Args:
        run: of `train`, or its folder.
        inputs: one, several, or the Path of a file of them.
        picture: where to write the task's picture of predictions, .png or .svg, if it has one.
        options: of the task, where the file differs from those of training: other columns.

    Raises:
        TypeError: no inputs. FileNotFoundError, ValueError: no run of a task; no input; a task without such a picture.
    """
    return predicted(run, inputs, None if picture is None else Path(picture), **options)[1]


def predicted(
    run: TrainedRun | str | Path, inputs: str | Path | Sequence[str], picture: Path | None = None, **options: Any
) -> tuple[Task, list[dict[str, Any]]]:
    """`predict`, and the task, which knows how to show a line of it."""
    given = inputs if isinstance(inputs, Path) else _checked(inputs)
    opened = open_run(run, options)
    examples = opened.task.read_inputs(given) if isinstance(given, Path) else opened.task.inputs(given)
    outputs = opened.task.predict(opened.model, examples)
    if picture is not None:
        write_picture(picture, lambda kind: opened.task.predicted_picture(opened.model, examples, outputs, kind))
    found = [opened.task.shown(example, output) for example, output in zip(examples, outputs, strict=True)]
    return opened.task, found


def _checked(inputs: str | Sequence[str]) -> list[str]:
    given = [inputs] if isinstance(inputs, str) else list(inputs)
    for one in given:
        if not isinstance(one, str):
            raise TypeError(f"inputs: expected texts, got {type(one).__name__}")
    if not given:
        raise ValueError("inputs: empty, expected at least one")
    return given
