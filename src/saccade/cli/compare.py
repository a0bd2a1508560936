"""`saccade compare`."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .. import __version__
from ._errors import UserError
from ._options import GroupedCommand, flattened
from ._parts._compare_options import (
    ComparedOptions,
    CompareMeasuringOptions,
    CompareOutputOptions,
    DataOptions,
    TaskOptions,
    lengths_of,
    refuse_beside,
    settings_of,
)
from ._parts._outputs import checked_files, piece_bar, read_results, write_files, write_plot

if TYPE_CHECKING:
    from ..benchmark.variants import ComparisonData, VariantComparison

EPILOG = """
Exit status: 0 measured, 1 a result was wrong (it is shown without a time), 2 bad input, 130 stopped by Ctrl-C (what was
measured until then is shown and written).
"""


def register(app: typer.Typer) -> None:
    app.command(
        "compare", cls=GroupedCommand, epilog=EPILOG, short_help="Choose an attention, by time, memory and error."
    )(flattened(compare))


def compare(
    source: DataOptions,
    chosen: ComparedOptions,
    measuring: CompareMeasuringOptions,
    output: CompareOutputOptions,
    tasks: TaskOptions,
) -> None:
    """Choose an attention: time, memory and error of each mechanism, and one sentence of advice.

    Without options on the q, k, v of the embedded model as it reads the start of a novel.
    """
    if tasks.task is not None:
        from ._parts._compare_tasks import compare_tasks

        refuse_beside("tasks bring data of their own", source)
        compare_tasks(tasks, chosen, measuring, output)
        return
    refuse_beside("is for tasks (--task)", tasks)
    if chosen.abilities:
        _list()
        return
    files = checked_files(output, output.markdown)
    from ..benchmark.variants import VariantComparison

    if output.read is not None:
        comparison, stopped = read_results(output.read, VariantComparison.from_json), False
    else:
        comparison, stopped = _measured(source, chosen, measuring, files)
    _show(comparison, output, files)
    if stopped:
        raise typer.Exit(130)
    if any(point.note.startswith("WRONG") for line in comparison.lines for point in line.points):
        raise typer.Exit(1)


def _list() -> None:
    """Print the table of abilities: with styles in a terminal, as Markdown in a pipe."""
    from rich.markdown import Markdown

    from ..operator.variants._table import capabilities
    from ..support._terminal._console import Console

    console = Console()
    if console.is_terminal:
        console.print(Markdown(capabilities()))
    else:
        typer.echo(capabilities())


def _measured(
    source: DataOptions, chosen: ComparedOptions, measuring: CompareMeasuringOptions, files: dict[str, Path]
) -> tuple[VariantComparison, bool]:
    """The comparison, and whether Ctrl-C interrupted the measurement."""
    from ..benchmark.attention.machine import describe
    from ..benchmark.variants import VariantComparison, measuring as work
    from ..benchmark.variants.catalogue import chosen_contenders as picked
    from ..benchmark.variants.distance import paths

    settings, lengths = settings_of(measuring), lengths_of(chosen, quick=measuring.quick)
    who = picked(chosen.mechanism, layers=chosen.layers)
    data = _data(source, max(lengths))
    record = {"command": shlex.join(["saccade", *sys.argv[1:]]), "tolerance": measuring.tolerance}
    record |= {"seed": settings.seed, **vars(settings.budget)}
    comparison = VariantComparison(describe(__version__, settings.threads), record, data.as_json())
    length = min(max(lengths), 256 if measuring.quick else 1024)
    with piece_bar("weighing, timing", 2 * len(who) + len(lengths)) as advance, contextlib.suppress(KeyboardInterrupt):
        work.measure(comparison, who, data, lengths, settings, _telling(advance, comparison, files))
        comparison.paths = paths(who, data.sizes._replace(length=length), settings.seed, advance)
        return comparison, False
    return comparison, True


def _data(source: DataOptions, most: int) -> ComparisonData:
    from ..benchmark.variants import model_data, random_data, tensor_data

    ways = {"random": source.random, "tensors": source.tensors, "model": source.model, "text": source.text}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1 and given != ["model", "text"]:
        raise UserError(f"--{' and --'.join(given)}: data comes from one of --random, --tensors and a model")
    if source.layer is not None and (source.random or source.tensors):
        raise UserError("--layer selects a layer of a model; this data has none")
    if source.random is not None:
        return random_data(source.random, causal=source.causal is not False)
    if source.tensors is not None:
        return tensor_data(source.tensors, causal=source.causal is not False)
    return model_data(source.model, source.text, source.layer, most=most, causal=source.causal)


def _telling(
    advance: Callable[[str], None], comparison: VariantComparison, files: dict[str, Path]
) -> Callable[[str], None]:
    """A callback that advances the progress bar and saves the results so far, in case of an interruption."""

    def told(what: str) -> None:
        advance(what)
        if what.endswith("tokens"):
            write_files(files, json=comparison.as_json)

    return told


def _show(comparison: VariantComparison, output: CompareOutputOptions, files: dict[str, Path]) -> None:
    from ..benchmark.variants import figure, tables

    write_files(files, json=comparison.as_json)
    if output.as_json == "-":
        typer.echo(comparison.as_json(), nl=False)
    else:
        _print(comparison)
    write_files(files, markdown=lambda: tables.page(comparison))
    write_plot(files, functools.partial(figure.draw, comparison))


def _print(comparison: VariantComparison) -> None:
    """Print tables with styles in a terminal, without in a pipe."""
    from rich.text import Text

    from ..benchmark.variants import tables
    from ..benchmark.variants.advice import advice
    from ..support._terminal._console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        typer.echo("\n".join(tables.text(comparison)))
        return
    titles = {section.title for section in tables.sections(comparison)}
    for line in tables.text(comparison):
        style = "bold" if line in titles or line == advice(comparison) else ""
        console.print(Text(line, style), soft_wrap=True)
