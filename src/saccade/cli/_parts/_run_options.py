"""Shared options of `saccade test` and `saccade predict`: a run, and changed options of its task."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ...make._task_registry import TASK_OPTIONS
from .._errors import UserError, require
from .._options import GroupedCommand
from ._existing import existing

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The folder of a run, as written by `saccade train --out`.",
        show_default=False,
        callback=existing(kind="folder"),
    ),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Change an option of the task from its value in training, such as text=review; repeat it for more.",
        show_default=False,
    ),
]
Picture = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the task's picture: .png or .svg.", show_default=False)
]


class RunCommand(GroupedCommand):
    """A command on a run, whose options for reading data `--set` changes."""

    columns_named_by = "; name yours with --set, as --set text=COLUMN"

    def refusal(self, option: str) -> str:
        name = option[2:].replace("-", "_")
        remembered = f"the run remembers it; where the data differs: --set {name}=VALUE"
        return remembered if name in _reading() else super().refusal(option)

    def option_that_skips(self, name: str) -> str:
        return f"--set {name}=true"


def _reading() -> set[str]:
    """The options of all tasks for reading data."""
    return {name for task in TASK_OPTIONS.values() for name in task.reading}


def changes_of(given: list[str] | None) -> dict[str, str]:
    """Names and values of texts such as `text=review`; the task converts values to the types of its fields."""
    changes: dict[str, str] = {}
    for change in given or ():
        name, equals, value = change.partition("=")
        if not equals or not name:
            raise UserError(f"--set {change}: expected NAME=VALUE")
        changes[name.replace("-", "_")] = value
    return changes


def picture_target(picture: Path | None) -> Path | None:
    """The file to draw into, if one is given: errors in its name are raised before any work."""
    if picture is None:
        return None
    from ...see.viewer import check_target

    require("matplotlib", "tasks")
    if picture.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"--picture {picture}: pictures are written to a name that ends in .png or .svg")
    return check_target(picture, force=True)


EPILOG = """
Device: a GPU if PyTorch finds one, otherwise the CPU; with ACCELERATE_USE_CPU=1 always the CPU. `accelerate launch -m
saccade ...` uses several GPUs.

Exit status: 0 trained (early stopping included), 2 bad input, a full disk at the end, or a loss that is not finite
(anomaly.txt in --out says where), 130 stopped by Ctrl-C, 143 by SIGTERM; the last two leave a checkpoint of the last
step, and --resume goes on from there.
"""


@contextlib.contextmanager
def ending(out: Path) -> Iterator[None]:
    """Exit with a message and a status if a signal, or another process, ends the run into `out`."""
    from ...distributed import RankFailed
    from ...make.training import Stopped
    from ...make.training.processes import OtherProcessFailed, is_main_process

    try:
        yield
    except OtherProcessFailed:
        raise typer.Exit(2) from None
    except RankFailed as failed:
        if is_main_process() or failed.rank == 0:  # then the main process cannot say it
            typer.echo(f"saccade: error: {failed}; {out} keeps its checkpoints; --resume goes on", err=True)
        raise typer.Exit(2) from None
    except Stopped as stopped:
        if is_main_process():
            typer.echo(f"saccade: stopped; {out} keeps the best weights and the last; --resume goes on", err=True)
        raise typer.Exit(143 if stopped.signal == signal.SIGTERM else 130) from None
