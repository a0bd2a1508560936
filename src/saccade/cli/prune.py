"""`saccade prune`: a model, or the model of a run of a task."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..support._tables import Table
from ._errors import UserError, require
from ._options import GroupedCommand, flattened, option
from ._parts._existing import existing_model, model_folder
from ._parts._outputs import result_console
from ._parts._run_options import EPILOG, ending
from ._parts._texts import existing_text, text_or_file

if TYPE_CHECKING:
    from ..make.models import Model
    from ..make.pruning import Comparison
    from ..make.tasks import PrunedRun

EMBEDDED = "embedded"


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Heads to remove"""

    heads: str | None = option(
        None,
        "The heads to remove: 4.1,5.3 is layer 4 head 1 and layer 5 head 3, counted from 0. For an "
        "encoder-decoder: encoder.4.1, decoder.4.1 and cross.4.1.",
        metavar="LIST",
    )
    keep: float | None = option(
        None,
        "Keep this share of all heads, at least one per layer, and remove those that matter least on --data. "
        "Heads are ranked by the absolute derivative of the loss with respect to a factor on each head.",
        metavar="SHARE",
    )


@dataclasses.dataclass(frozen=True)
class PruneDataOptions:
    """Data for ranking and evaluation"""

    data: str | None = option(
        None,
        "For a run: data in the format of its task, for ranking, evaluation and training.  [default: the "
        "run's training data]  For other models: a text file, or a text in quotes; loss and forward time are "
        "measured on it before and after. It is read as one text, in windows of at most 256 tokens that "
        "cross line breaks. With --keep every second window ranks the heads, and the others measure the loss.",
        metavar="FILE_OR_TEXT",
        callback=existing_text(),
    )
    tokens: int = option(32_768, "Maximum tokens to read from a text.", metavar="N")


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """For a run: training after the removal"""

    steps: int | None = option(None, "Optimizer steps.  [default: no further training]")
    epochs: int | None = option(None, "Passes over the training data.")
    minutes: float | None = option(None, "Stop after this many minutes.")
    rate: float | None = option(None, "Peak learning rate.  [default: the task's default with --from]")
    seed: int | None = option(None, "Seed of batches and dropout.  [default: 0]")
    resume: bool = option(False, "Continue training where it stopped.")


@dataclasses.dataclass(frozen=True)
class PruneOptions:
    """Options"""

    out: Path | None = option(None, "The folder to write.  [default: nothing is written]", metavar="DIR")
    force: bool = option(False, "Write into a folder that is not empty; for a run, replace the run in it.")
    as_numbers: bool = option(False, "Print the numbers as JSON.", "--json")


def register(app: typer.Typer) -> None:
    short = "Remove attention heads from a model permanently."
    app.command("prune", cls=GroupedCommand, epilog=EPILOG, short_help=short)(flattened(prune))


def prune(
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run of `saccade train TASK`, a model folder, a name on the Hugging Face hub (org/name), or "
            f"{EMBEDDED}: the model within.",
            show_default=False,
            callback=existing_model(lambda source: None if source == EMBEDDED else model_folder(source)),
        ),
    ],
    chosen: HeadOptions,
    judging: PruneDataOptions,
    learning: TrainingOptions,
    common: PruneOptions,
) -> None:
    """Remove attention heads from a model permanently: its projections and files get smaller.

    The smaller model computes the same as the model with those heads' outputs set to 0. A run of a task is evaluated by
    its metric on its validation data; it can be trained further, and stays a run of its task.
    """
    from ..make.training.run_folder.layout import LANGUAGE, task_of

    if task_of(Path(model)) not in (None, LANGUAGE):
        _prune_run(Path(model), chosen, judging, learning, common)
        return
    given = [name for name, value in vars(learning).items() if value not in (None, False)]
    if given:
        raise UserError(f"--{given[0]}: only of a run of a task, which {model} is not; go on with `saccade train`")
    _check(chosen, judging, common.out, force=common.force)
    text = None if judging.data is None else text_or_file(judging.data).text
    from ..make.models import load
    from ..make.pruning import compare_pruned

    opened = load(None if model == EMBEDDED else model)
    with _progress() as progress:
        made = compare_pruned(
            opened, chosen.heads, keep=chosen.keep, text=text, tokens=judging.tokens, progress=progress
        )
    if common.out is not None:
        _save(opened, common.out)
    if common.as_numbers:
        values = {"model": model, "out": None if common.out is None else str(common.out), **made.as_json()}
        typer.echo(json.dumps(values, separators=(",", ":"), allow_nan=False))
        return
    _show(made, common.out)


def _prune_run(
    run: Path, chosen: HeadOptions, judging: PruneDataOptions, learning: TrainingOptions, common: PruneOptions
) -> None:
    if (chosen.heads is None) == (chosen.keep is None):
        raise UserError("give the heads, --heads 1.1,1.3, or the share to keep, --keep .5")
    if common.out is None:
        raise UserError("--out: missing; the folder to write the pruned run into")
    require("accelerate", "tasks")
    from ..make.tasks._compression._prune import PruneRequest, without_heads
    from ..make.training.progress import ConsoleReporter

    options = {name: value for name, value in vars(learning).items() if value is not None}
    resume = options.pop("resume")
    wanted = PruneRequest(run, common.out, chosen.keep, chosen.heads)
    with _progress() as progress:
        removed = without_heads(wanted, judging.data, options, overwrite=common.force, resume=resume, progress=progress)
    with ending(common.out), ConsoleReporter(removed.run, quiet=common.as_numbers) as reporter:
        made = removed.finished(reporter)
    if common.as_numbers:
        values = {"run": str(run), "out": str(common.out), **made.as_json()}
        typer.echo(json.dumps(values, separators=(",", ":"), allow_nan=False))
        return
    _show(made, common.out)


def _check(chosen: HeadOptions, judging: PruneDataOptions, out: Path | None, *, force: bool) -> None:
    if (chosen.heads is None) == (chosen.keep is None):
        raise UserError("give the heads, --heads 4.1,5.3, or the share to keep, --keep .5 --data FILE")
    if chosen.keep is not None and judging.data is None:
        raise UserError("--keep ranks the heads by a text: give one with --data FILE")
    if judging.tokens < 2:
        raise UserError(f"--tokens {judging.tokens}: at least 2")
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; expected a folder")
    if out is not None and out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(f"--out {out}: is not empty; --force writes into it, --out elsewhere")


def _save(model: Model, out: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # shown as a line of the result
        model.save(out)


def _show(made: Comparison | PrunedRun, out: Path | None) -> None:
    from rich.text import Text

    console = result_console()
    rows = [
        (layer.name, _of_groups(layer, 0), _of_groups(layer, 1), " ".join(map(str, layer.removed)) or "-")
        for layer in made.layers
    ]
    for at, line in enumerate(Table(("layer", "heads", "left", "removed"), rows, "lrrl").lines()):
        console.print(Text(line, "dim" * (at == 0)), soft_wrap=True)
    renumbered = _renumbered(made)
    if renumbered:
        console.print(renumbered, style="dim", highlight=False, soft_wrap=True)
    console.print()
    for name, values, share in made.lines():
        console.print(Text.assemble((f"{name}  ", "dim"), values, (f"  {share}", "dim")), soft_wrap=True)
    if made.pruning.note:
        console.print(Text(made.pruning.note, "yellow"), soft_wrap=True)
    for line in getattr(made, "verdict", ()):
        console.print(Text(line, "yellow"), soft_wrap=True)
    if out is not None:
        console.print(Text.assemble(("Written  ", "dim"), (str(out), "bold")), soft_wrap=True)


def _renumbered(made: Comparison | PrunedRun) -> str:
    """A sentence about new numbers of the remaining heads, with the first as an example; "" if no number changes."""
    for layer in made.layers:
        kept = [head for head in range(layer.heads[0]) if head not in layer.removed]
        moved = next(((old, new) for new, old in enumerate(kept) if old != new), None)
        if moved is not None:
            old, new = moved
            return f"The remaining heads are renumbered from 0: {layer.name}.{old} is now {layer.name}.{new}."
    return ""


def _of_groups(layer: Any, side: int) -> str:
    heads, kv_heads = layer.heads[side], layer.kv_heads[side]
    return str(heads) if heads == kv_heads else f"{heads} ({kv_heads} for keys)"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error, if that is a terminal."""
    from ..support._terminal._console import progress_bar

    with progress_bar() as update:
        yield lambda what, done, total: update(description=what, completed=done, total=total)
