"""`saccade look`."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from .. import __version__
from ..support._garbage_collection import uncollected
from ._errors import UserError, require
from ._options import CommonOptions, GroupedCommand, flattened, option
from ._parts._look_corpus import CorpusOptions, study
from ._parts._outputs import result_console
from ._parts._texts import (
    InputText,
    TextArgument,
    again_arguments,
    check_length,
    command_line,
    given_text,
    parse_head,
    word_range,
)

if TYPE_CHECKING:
    from ..see.inspection import Look, TextModel

REPORT = Path("saccade-report.html")
REPORTS, FIGURES = (".html", ".htm"), (".png", ".svg")  # what --out writes, by the ending of its name


class MapOptions(NamedTuple):
    """The head and the rows to map, and the first word that is read."""

    head: tuple[int, int] | None
    rows: tuple[int, int] | None
    first: int


@dataclasses.dataclass(frozen=True)
class LookOptions:
    """A look at one text"""

    head: str | None = option(
        None,
        "The head to map: 2.5 is layer 2, head 5.  [default: the head with the clearest pattern]",
        metavar="LAYER.HEAD",
    )
    first: int | None = option(None, "The first word to read, counted from 1.", "--from", metavar="N")
    last: int | None = option(None, "The last word to read.", "--to", metavar="N")
    rows: str | None = option(
        None,
        "The words to map, as N-M; the model still reads the whole text.  [default: all; of a text of more "
        "than 1,000 words, those around the clearest finding]",
        metavar="N-M",
    )


@dataclasses.dataclass(frozen=True)
class WrittenOptions(CommonOptions):
    """Options"""

    out: Path | None = option(
        None,
        "Where the report goes; a .png or .svg is drawn beside it for papers; the numbers of a study as .csv or .json."
        f"  [default: {REPORT}]",
        metavar="FILE",
    )


def register(app: typer.Typer) -> None:
    app.command("look", cls=GroupedCommand, short_help="Show what a language model attends to in a text.")(
        flattened(look)
    )


def look(
    *,
    text: TextArgument = None,
    chosen: LookOptions,
    studies: CorpusOptions,
    common: WrittenOptions,
) -> None:
    """Look at what a language model attends to in TEXT: sentences, a map, the role of every head, and a report.

    Words are counted with their punctuation. Standard input is read only for - or when no TEXT is given.
    """
    model, out, force, as_numbers = common.model, common.out, common.force, common.as_numbers
    if studies.asked:
        if chosen != LookOptions():
            raise UserError(
                "--head, --from, --to and --rows are for a look at one TEXT; a study of several texts reads them whole"
            )
        study(studies, model, text=text, out=out, force=force, as_numbers=as_numbers)
        return
    given = word_range(given_text(text, "look"), chosen.first, chosen.last)
    wanted = MapOptions(parse_head(chosen.head), _parse_rows(chosen.rows), chosen.first or 1)
    is_figure = out is not None and out.suffix.lower() in FIGURES
    if out is not None and out.suffix.lower() not in REPORTS + FIGURES and not out.is_dir():
        raise UserError(
            f"--out {out}: a report is written to an .html, a figure to a .png or .svg; --json prints numbers"
        )
    figure, report = (out, REPORT) if is_figure else (None, out or REPORT)
    if figure:
        require("matplotlib", "plot")
    opened = _opened(model, [p for p in (report, figure) if p], force=force)
    if chosen.first is None and chosen.last is None:
        given = _held(opened, given)
    result = _look(opened, given, model, wanted, quiet=as_numbers)
    _write(result, report, figure)
    if as_numbers:
        from ..see.viewer import as_json

        numbers = as_json(result) | {"report": str(report), "figure": str(figure) if figure else None}
        typer.echo(json.dumps(numbers, separators=(",", ":"), allow_nan=False))
    else:
        _print(result, given, model, report, figure)


# The look


def _parse_rows(rows: str | None) -> tuple[int, int] | None:
    if rows is None:
        return None
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", rows.strip())
    if not match:
        raise UserError(f"--rows {rows}: expected the first and the last word, such as 201-240")
    return int(match[1]), int(match[2] or match[1])


def _opened(model: str | None, targets: list[Path], *, force: bool) -> TextModel:
    with uncollected():  # imports PyTorch
        from ..see.inspection import open_model
        from ..see.viewer import check_target

    for target in targets:
        check_target(target, force=force)
    return open_model(model)


def _held(model: TextModel, given: InputText) -> InputText:
    """The words that fit into the model's context, of a text whose words have several tokens."""
    from ..see.inspection import split_words, words_that_fit
    from ..see.inspection._collect import read
    from ..see.inspection._words import about_tokens

    spans = split_words(given.text)
    fit = words_that_fit(model, given.text, spans)
    if not 0 < fit < len(spans) or not about_tokens(read(model, given.text[: spans[fit - 1][1]])[1]):
        return given
    return word_range(given, None, fit)


def _look(opened: TextModel, given: InputText, model: str | None, wanted: MapOptions, *, quiet: bool) -> Look:
    from ..see.analysis.tables import shown_progress
    from ..see.inspection import look as look_through

    check_length(opened, given.text, wanted.first)
    name = "embedded model" if model is None else f"model {opened.name}"
    with shown_progress("layers", quiet=quiet) as progress:
        return look_through(
            opened, given.text, wanted.head, rows=wanted.rows, name=name, source=given.source, progress=progress
        )


def _write(look: Look, report: Path, figure: Path | None) -> None:
    from ..see.viewer import check_target, draw_figure, render_report, write_whole

    write_whole(check_target(report, force=True), render_report(look, __version__).encode("utf-8"))
    if figure:
        write_whole(check_target(figure, force=True), draw_figure(look, figure.suffix.lower()[1:]))


# What is printed


def _print(look: Look, given: InputText, model: str | None, report: Path, figure: Path | None) -> None:
    from rich.text import Text

    from ..see.viewer import print_look

    console = result_console()
    print_look(console, look)
    console.print()
    for name, path in (("Report", report), ("Figure", figure)):
        if path:
            link = f"bold link {path.resolve().as_uri()}" if console.is_terminal else "bold"
            console.print(Text.assemble((f"{name}  ", "dim"), (str(path), link)), soft_wrap=True)
    for i, command in enumerate(_suggested_commands(look, given, model, figure)):
        console.print(Text.assemble(("Next    " if i == 0 else "        ", "dim"), command), soft_wrap=True)


def _suggested_commands(look: Look, given: InputText, model: str | None, figure: Path | None) -> list[str]:
    """Three commands worth trying now."""
    options = ["--model", model] if model else []
    others = [
        (f.layer, f.head) for f in look.findings if f.layer is not None and (f.layer, f.head) != (look.layer, look.head)
    ]
    below = ((look.layer + 1) % look.seen.layers, look.head)
    layer, head = others[0] if others else below if below in look.seen.places() else (look.layer, look.head)
    beginning = " ".join(given.text.split()[:5]).rstrip(".,;:!?")
    drawing = "map.png" if figure and figure.suffix.lower() == ".svg" else "map.svg"
    writes = command_line("generate", *options, *again_arguments(beginning))
    return [
        command_line("look", *options, "--head", f"{layer}.{head}", *given.again),
        command_line("look", *options, "--out", drawing, *given.again),
        writes if look.generates else command_line("look", *options, *_elsewhere(look), *given.again),
    ]


def _elsewhere(look: Look) -> list[str]:
    """Options for another look: at another part of a long text, or the numbers of a short one."""
    if look.whole is None:
        return ["--json"]
    first, last = look.runs(range(len(look.seen.words)))[-1]
    start = last + 1 if last < look.words else 1
    return ["--rows", f"{start}-{min(start + last - first, look.words)}"]
