"""`saccade.tasks.predict`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
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
    r"""The predictions of a run's model, as plain values: for a text its label and the probabilities of all labels.

    Args:
        run: of `train`, or its folder.
        inputs: one, several, or the Path of a file of them.
        picture: where to write the task's picture of predictions, .png or .svg, if it has one.
        options: of the task, where the file differs from those of training: other columns.

    Returns:
        A row for each input, in their order. That of an empty input, if those are allowed, has None for all else.

    Raises:
        TypeError: no inputs.
        FileNotFoundError, ValueError: no run of a task; no input; a task without such a picture.

    Example:
        >>> import pathlib, tempfile, saccade
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data = pathlib.Path(folder, "reviews.csv")
        ...     _ = data.write_text("text,label\n" + "a good film,positive\na bad film,negative\n" * 20)
        ...     small = dict(layers=1, heads=2, width=8, vocabulary=280, steps=2, precision="no")
        ...     run = saccade.tasks.train("classify", data, folder + "/run", **small)
        ...     [found] = saccade.tasks.predict(run, ["a good film"])
        >>> found["text"], sorted(found["probabilities"])
        ('a good film', ['negative', 'positive'])
    """
    result = predicted(run, inputs, **options)
    if picture is not None:
        result.save_picture(Path(picture))
    return result.values


@dataclasses.dataclass(frozen=True)
class Predicted:
    """The result of `predict`.

    Attributes:
        task: whose `line` formats a prediction.
        values: of each input, plain; None for all but the input where it is empty.
        empty: the numbers of the empty inputs.
        save_picture: writes the task's picture. ValueError if it has none.
    """

    task: Task
    values: list[dict[str, Any]]
    empty: list[int]
    save_picture: Callable[[Path], None]


def predicted(run: TrainedRun | str | Path, inputs: str | Path | Sequence[str], **options: Any) -> Predicted:
    """`predict`, with further results."""
    given = inputs if isinstance(inputs, Path) else _checked(inputs)
    opened = open_run(run, options)
    every = opened.task.read_inputs(given) if isinstance(given, Path) else opened.task.inputs(given)
    empty = [n for n, example in enumerate(every) if opened.task.is_empty(example)]
    examples = [example for example in every if not opened.task.is_empty(example)] if empty else every
    outputs = opened.task.predict(opened.model, examples)
    values = [opened.task.shown(example, output) for example, output in zip(examples, outputs, strict=True)]
    for n in empty:  # their rows stay: predictions are put beside the file that they are of
        values.insert(n, {**dict.fromkeys(values[0]), next(iter(values[0])): ""})
    if empty:
        warnings.warn(
            f"{len(empty):,} of {len(every):,} inputs are empty and get no prediction, the first at "
            f"{every[empty[0]].place}",
            stacklevel=3,
        )

    def save(picture: Path) -> None:
        write_picture(picture, lambda kind: opened.task.predicted_picture(opened.model, examples, outputs, kind))

    return Predicted(opened.task, values, empty, save)


def _checked(inputs: str | Sequence[str]) -> list[str]:
    given = [inputs] if isinstance(inputs, str) else list(inputs)
    for text in given:
        if not isinstance(text, str):
            raise TypeError(f"inputs: expected texts, got {type(text).__name__}")
    if not given:
        raise ValueError("inputs: empty, expected at least one")
    return given
