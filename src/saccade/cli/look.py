"""`saccade look`."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from .. import __version__
from ._errors import UserError, require
from ._look_corpus import CorpusOptions, study
from ._options import GroupedCommand, flattened, option
from ._outputs import result_console

if TYPE_CHECKING:
    from ..inspection import Look, TextModel

REPORT = Path("saccade-report.html")
LARGEST_FILE = 64 * 2**20  # bytes; far more than any context, and no machine suffers from reading it
REPORTS, FIGURES = (".html", ".htm"), (".png", ".svg")  # what --out writes, by the ending of its name
TEXT_FILES = {".txt", ".text", ".md", ".rst", ".html", ".htm", ".tex", ".csv", ".json", ".log", ".py"}


class InputText(NamedTuple):
    """The text, how a command names it again, and where it came from ("" for the command line)."""

    text: str
    again: list[str]
    source: str


class MapOptions(NamedTuple):
    """The head and the rows to map, and the first word that is read."""

    head: tuple[int, int] | None
    rows: tuple[int, int] | None
    first: int


@dataclasses.dataclass(frozen=True)
class LookOptions:
    """A look at one text"""

    head: str | None = option(
        None, "The head to map, as 2.5: layer 2 head 5.  [default: the most telling]", metavar="LAYER.HEAD"
    )
    first: int | None = option(None, "The first word to read, counted from 1.", "--from", metavar="N")
    last: int | None = option(None, "The last word to read.", "--to", metavar="N")
    rows: str | None = option(
        None,
        "Of what is read, the words to map, with all the rest around them.  [default: all; of a text of more "
        "than 1,000 words, those around what tells most]",
        metavar="N-M",
    )


@dataclasses.dataclass(frozen=True)
class CommonOptions:
    """Options"""

    model: str | None = option(
        None,
        "A model folder, of Saccade's or of transformers, or a name on the Hugging Face hub (org/name).  "
        "[default: the embedded model]",
        metavar="DIR_OR_HUB_ID",
    )
    out: Path | None = option(
        None,
        "Where the report goes; a .png or .svg is drawn beside it for papers; the numbers of a study as .csv or .json."
        f"  [default: {REPORT}]",
        metavar="FILE",
    )
    force: bool = option(False, "Replace a file that Saccade did not make.", "--force")
    as_numbers: bool = option(False, "Print the numbers, for programs.", "--json")


def register(app: typer.Typer) -> None:
    app.command("look", cls=GroupedCommand, short_help="Show what a language model attends to in a text.")(
        flattened(look)
    )


def look(
    *,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="A text in quotes, a file, or - for standard input.", show_default=False),
    ] = None,
    chosen: LookOptions,
    studies: CorpusOptions,
    common: CommonOptions,
) -> None:
    """Look at what a language model attends to in TEXT: sentences, a map, the role of every head, and a report.

    Words are counted with their punctuation. Standard input is read only for - or when no TEXT is given.
    """
    model, out, force, as_numbers = common.model, common.out, common.force, common.as_numbers
    if studies.asked:
        if chosen != LookOptions():
            raise UserError("--head, --from, --to and --rows are for a look at one TEXT; a study reads all it is given")
        study(studies, model, text=text, out=out, force=force, as_numbers=as_numbers)
        return
    given = _word_range(given_text(text), chosen.first, chosen.last)
    wanted = MapOptions(parse_head(chosen.head), _parse_rows(chosen.rows), chosen.first or 1)
    is_figure = out is not None and out.suffix.lower() in FIGURES
    if out is not None and out.suffix.lower() not in REPORTS + FIGURES and not out.is_dir():
        raise UserError(
            f"--out {out}: a report is written to an .html, a figure to a .png or .svg; --json prints numbers"
        )
    figure, report = (out, REPORT) if is_figure else (None, out or REPORT)
    if figure:
        require("matplotlib", "plot")
    seen = _look(given, model, wanted, targets=[p for p in (report, figure) if p], force=force, quiet=as_numbers)
    _write(seen, report, figure)
    if as_numbers:
        from ..viewer import as_json

        numbers = as_json(seen) | {"report": str(report), "figure": str(figure) if figure else None}
        typer.echo(json.dumps(numbers, separators=(",", ":"), allow_nan=False))
    else:
        _print(seen, given, model, report, figure)


# The text


def given_text(arguments: list[str] | None, command: str = "look") -> InputText:
    """The text that the arguments of `saccade <command>` are, name or ask for."""
    if arguments and len(arguments) > 1:
        if "-" in arguments:
            raise UserError("both a text and - for standard input came; give one of them")
        raise UserError(
            f"{len(arguments)} arguments came; put the text in quotes: saccade {command} {_quoted(' '.join(arguments))}"
        )
    if not arguments or arguments == ["-"]:
        return _from_standard_input(command, asked=bool(arguments))
    argument = arguments[0]
    path = _as_file(argument)
    if path is None:
        return InputText(_clean(argument, "the text"), _again(argument), "")
    return InputText(_clean(_decoded(_read(path), str(path)), str(path)), [str(path)], f"from file {path}")


def _from_standard_input(command: str, *, asked: bool) -> InputText:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise UserError(f'no text came: saccade {command} "The cat sat on the mat."')
    text = _clean(_decoded(sys.stdin.buffer.read(LARGEST_FILE + 1), "standard input"), "standard input")
    return InputText(text, _again(" ".join(text.split()[:12])), "from standard input")


def _as_file(argument: str) -> Path | None:
    """The file that ``argument`` names; None where it is a text. What can only be a missing file is an error."""
    path = Path(argument)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # too long or impossible as a name: a text
        return None
    if path.is_dir() and argument.strip(". "):
        raise UserError(f"{argument}: is a folder; give a text file")
    if exists and not path.is_dir():
        return path
    looks_like_one = path.suffix.lower() in TEXT_FILES or argument.startswith(("/", "./", "../", "~/"))
    if looks_like_one and not re.search(r"\s", argument):
        raise UserError(f"{argument}: no such file")
    return None


def _read(path: Path) -> bytes:
    if not (path.is_file() or path.is_fifo()):
        raise UserError(f"{path}: not an ordinary file")
    with path.open("rb") as file:
        return file.read(LARGEST_FILE + 1)


def _decoded(content: bytes, name: str) -> str:
    if len(content) > LARGEST_FILE:
        raise UserError(f"{name}: larger than {LARGEST_FILE >> 20} MiB; give a part of it")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: not a text in UTF-8 (byte {content[error.start]:#04x} at position {error.start:,})"
        ) from None
    if "\0" in text:
        raise UserError(f"{name}: a binary file, not a text")
    return text


def _clean(text: str, name: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise UserError(f"{name} is empty; one word at least is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{name} is not valid UTF-8") from None
    return text


def _word_range(given: InputText, first: int | None, last: int | None) -> InputText:
    """The words ``first`` to ``last``, both included and counted from 1."""
    if first is None and last is None:
        return given
    from ..inspection import split_words

    spans = split_words(given.text)
    for name, number in (("--from", first), ("--to", last)):
        if number is not None and number < 1:
            raise UserError(f"{name} {number}: words are counted from 1")
    start, stop = first or 1, min(last if last is not None else len(spans), len(spans))
    if start > stop:
        raise UserError(
            f"--from {start} --to {stop if last is None else last}: no such words; the text has 1 to {len(spans):,}"
        )
    again = [*given.again, "--from", str(start), "--to", str(stop)]
    words = f"words {start:,} to {stop:,} of {len(spans):,}"
    return InputText(given.text[spans[start - 1][0] : spans[stop - 1][1]], again, f"{words} {given.source}".strip())


# The look


def parse_head(head: str | None) -> tuple[int, int] | None:
    """(layer, head) of `2.5`."""
    if head is None:
        return None
    match = re.fullmatch(r"(\d{1,6})[.:](\d{1,6})", head.strip())
    if not match:
        raise UserError(f"--head {head}: expected layer.head, such as 2.5")
    return int(match[1]), int(match[2])


def _parse_rows(rows: str | None) -> tuple[int, int] | None:
    if rows is None:
        return None
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", rows.strip())
    if not match:
        raise UserError(f"--rows {rows}: expected the first and the last word, such as 201-240")
    return int(match[1]), int(match[2] or match[1])


def _look(
    given: InputText, model: str | None, wanted: MapOptions, *, targets: list[Path], force: bool, quiet: bool
) -> Look:
    from ..analysis.tables import shown_progress
    from ..inspection import look as look_through
    from ..inspection import open_model
    from ..viewer import check_target

    for target in targets:
        check_target(target, force=force)
    opened = open_model(model)
    _check_length(opened, given.text, wanted.first)
    name = "embedded model" if model is None else f"model {opened.name}"
    with shown_progress("layers", quiet=quiet) as told:
        return look_through(
            opened, given.text, wanted.head, rows=wanted.rows, name=name, source=given.source, progress=told
        )


def _check_length(model: TextModel, text: str, first: int) -> None:
    from ..inspection import split_words, words_that_fit

    spans = split_words(text)
    fit = words_that_fit(model, text, spans)
    if fit >= len(spans):
        return
    room = f"this model reads {model.room:,} tokens at once"
    if not fit:
        raise UserError(f"the text is too long: {room}, and its first word alone has more")
    part = f"--from {first} --to {first + fit - 1}" if first > 1 else f"--to {fit}"
    raise UserError(
        f"the text is too long: it has {len(spans):,} words, and {room}, which is {fit:,} words here; add {part}"
    )


def _write(seen: Look, report: Path, figure: Path | None) -> None:
    from ..viewer import check_target, draw_figure, render_report, write_whole

    write_whole(check_target(report, force=True), render_report(seen, __version__).encode("utf-8"))
    if figure:
        write_whole(check_target(figure, force=True), draw_figure(seen, figure.suffix.lower()[1:]))


# What is printed


def _print(seen: Look, given: InputText, model: str | None, report: Path, figure: Path | None) -> None:
    from rich.text import Text

    from ..viewer import print_look

    console = result_console()
    print_look(console, seen)
    console.print()
    for name, path in (("Report", report), ("Figure", figure)):
        if path:
            link = f"bold link {path.resolve().as_uri()}" if console.is_terminal else "bold"
            console.print(Text.assemble((f"{name}  ", "dim"), (str(path), link)), soft_wrap=True)
    for i, command in enumerate(_suggested_commands(seen, given, model, figure)):
        console.print(Text.assemble(("Next    " if i == 0 else "        ", "dim"), command), soft_wrap=True)


def _suggested_commands(seen: Look, given: InputText, model: str | None, figure: Path | None) -> list[str]:
    """Three commands worth trying now."""
    options = ["--model", model] if model else []
    others = [
        (f.layer, f.head) for f in seen.findings if f.layer is not None and (f.layer, f.head) != (seen.layer, seen.head)
    ]
    below = ((seen.layer + 1) % seen.seen.layers, seen.head)
    layer, head = others[0] if others else below if below in seen.seen.places() else (seen.layer, seen.head)
    beginning = " ".join(given.text.split()[:5]).rstrip(".,;:!?")
    drawing = "map.png" if figure and figure.suffix.lower() == ".svg" else "map.svg"
    writes = _command("generate", *options, *_again(beginning))
    return [
        _command("look", *options, "--head", f"{layer}.{head}", *given.again),
        _command("look", *options, "--out", drawing, *given.again),
        writes if seen.generates else _command("look", *options, *_elsewhere(seen), *given.again),
    ]


def _elsewhere(seen: Look) -> list[str]:
    """Options for what else there is to see: another part of a long text, the numbers of a short one."""
    if seen.whole is None:
        return ["--json"]
    first, last = seen.runs(range(len(seen.seen.words)))[-1]
    start = last + 1 if last < seen.words else 1
    return ["--rows", f"{start}-{min(start + last - first, seen.words)}"]


def _again(text: str) -> list[str]:
    """The text as an argument; what begins with a dash must not be taken for an option."""
    return ["--", text] if text.startswith("-") else [text]


def _command(*parts: str) -> str:
    if "--" in parts and "--from" in parts:  # options come before the double dash
        at, cut = parts.index("--"), parts.index("--from")
        parts = (*parts[:at], *parts[cut:], *parts[at:cut])
    return " ".join(["saccade", *(_quoted(part) for part in parts)])


def _quoted(argument: str) -> str:
    """As a shell takes it back: bare, in double quotes where nothing in it is special there, else as shlex does."""
    if os.name == "nt":
        import subprocess

        return subprocess.list2cmdline([argument])
    if shlex.quote(argument) == argument:
        return argument
    return f'"{argument}"' if not re.search(r'["$`\\!\n]', argument) else shlex.quote(argument)
