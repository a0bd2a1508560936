"""`saccade view`."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ._errors import UserError, require
from ._options import GroupedCommand, flattened, option
from ._parts._existing import existing_model
from ._parts._outputs import result_console
from ._parts._texts import check_length, existing_text, given_text, parse_head, text_or_file, word_range

if TYPE_CHECKING:
    from ..see.viewer.server import Viewer
    from ..see.viewer.server._session import Session

SIGTERM_STATUS = 128 + signal.SIGTERM
_NAMES = {"first": "from", "last": "to"}
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclasses.dataclass(frozen=True)
class ShownOptions:
    """What to show"""

    model: list[str] | None = option(
        None,
        "A model folder (Saccade or transformers), or a name on the Hugging Face hub (org/name). Give the "
        "option twice to compare two models.  [default: the embedded model]",
        metavar="DIR_OR_HUB_ID",
        callback=existing_model(),
    )
    weights: str | None = option(
        None,
        "Compare the model with itself where linear layers hold bfloat16, int8, int4 or stored.",
        metavar="NAME",
    )
    against: str | None = option(
        None,
        "A second text, or a second file of `saccade.watch`, to compare with the first.",
        metavar="TEXT_OR_FILE",
        callback=existing_text(),
    )
    target: str | None = option(
        None, "The target text for an encoder-decoder.", metavar="TEXT_OR_FILE", callback=existing_text()
    )
    generate: int = option(
        0,
        "First continue the text by N tokens, each the most probable one. An encoder-decoder writes at most N.",
        metavar="N",
        min=0,
    )
    context: int | None = option(
        None,
        "Maximum tokens in one pass, for models whose positions extend beyond the training length; quality "
        "there is not guaranteed.  [default: the models' own context]",
        metavar="N",
        min=1,
    )
    head: str | None = option(
        None,
        "The head to show first: 2.5 is layer 2, head 5.  [default: the head with the clearest pattern]",
        metavar="LAYER.HEAD",
    )
    first: int | None = option(None, "The first word to read, counted from 1.", "--from", metavar="N")
    last: int | None = option(None, "The last word to read.", "--to", metavar="N")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options"""

    budget: str | None = option(
        None, "Maximum memory for queries and keys, such as 4GiB.  [default: no limit]", metavar="SIZE"
    )
    folder: Path | None = option(
        None,
        "Folder for the queries and keys that exceed --budget; its files are deleted when the viewer ends.",
        metavar="DIR",
    )
    port: int | None = option(None, "The port to listen on.  [default: a free one]", metavar="N", min=0, max=65535)
    host: str | None = option(
        None,
        "The address to listen on. Any other than 127.0.0.1 gives access to every machine that has the "
        "token.  [default: 127.0.0.1]",
        metavar="ADDRESS",
    )
    no_browser: bool = option(False, "Print the address and do not open a browser.", "--no-browser")
    keep: bool = option(False, "Keep running after the last page is closed.", "--keep")


def register(app: typer.Typer) -> None:
    app.command("view", cls=GroupedCommand, short_help="Show any head's attention for a text, in the browser.")(
        flattened(view)
    )


def view(
    *,
    subject: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT_OR_FILE",
            help="A text in quotes, a text file, a file that `saccade.watch` saved, an input of a run that does not "
            "read text (an image, a sound, a table, a node), or - for standard input.",
            show_default=False,
            callback=existing_text(),
        ),
    ] = None,
    shown: ShownOptions,
    server: ServerOptions,
) -> None:
    """Show every head's attention in the browser, at any zoom: for a text, or for a file saved by watch.  The viewer
    answers only this computer, and only with the token in its address. It ends at Ctrl-C, and ten minutes after its
    page was closed."""
    require("starlette", "view")
    require("uvicorn", "view")
    head, budget = parse_head(shown.head), _bytes(server.budget)
    from ..see.viewer.server import MOST_IDLE, start

    with _ended_by_sigterm():
        session = _session(subject, shown, head, budget, server.folder)
        most_idle = None if server.keep else MOST_IDLE
        viewer = start(session, host=server.host, port=server.port, most_idle=most_idle)
        try:
            with viewer:
                _tell_and_wait(viewer, server)
        except (KeyboardInterrupt, SystemExit) as end:
            if viewer.computing:
                _leave(SIGTERM_STATUS if isinstance(end, SystemExit) else 130)
            raise


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within the context, SIGTERM ends the command like Ctrl-C, so that temporary files are deleted."""

    def end(*_: object) -> NoReturn:
        sys.exit(SIGTERM_STATUS)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell_and_wait(viewer: Viewer, server: ServerOptions) -> None:
    _print_address(viewer.url)
    for note in viewer.session.notes:
        typer.echo(f"saccade: {note}", err=True)
    from ..see.viewer.server import OTHERS

    if viewer.lets_others_in:
        typer.echo(f"saccade: {OTHERS}", err=True)
    if not server.no_browser and not viewer.open_browser():
        typer.echo("saccade: no browser could be opened here; open this address in one", err=True)
    if viewer.wait():
        typer.echo("saccade: no page is open any more, so the viewer has ended (--keep keeps it running)", err=True)


def _leave(status: int) -> NoReturn:
    """Exit immediately. Python would wait for its threads, which can compute for seconds on long maps."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _print_address(url: str) -> None:
    from rich.text import Text

    console = result_console()
    link = f"bold link {url}" if console.is_terminal else "bold"
    console.print(Text.assemble(("Viewer  ", "dim"), (url, link)), soft_wrap=True)
    console.print(Text("        Ctrl-C ends it", "dim"))
    console.file.flush()


def _bytes(size: str | None) -> int | None:
    """Parse a size such as 4GiB to bytes."""
    if size is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMG]?I?B|)", size.strip(), re.IGNORECASE)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UserError(f"--budget {size}: expected a size such as 500MiB or 4GiB")
    return int(float(match[1]) * unit)


def _session(
    arguments: list[str] | None, shown: ShownOptions, head: tuple[int, int] | None, budget: int | None, folder: Any
) -> Session:
    """Open the model and compute the session, with a progress bar over layers."""
    from ..see.analysis.tables import shown_progress
    from ..see.viewer.server import open_session

    if any(map(_reads_no_text, shown.model or ())):
        return _session_of_input(arguments, shown, head)
    subjects = _subjects(arguments, shown)
    target = None if shown.target is None else text_or_file(shown.target).text
    models = _models(subjects, shown)
    how = {"target": target, "generate": shown.generate, "budget": budget, "folder": folder}
    with shown_progress("layers") as progress:
        session = open_session(subjects, model=models, head=head, progress=progress, **how)
    for run in session.runs:
        if run.beyond is not None:
            tokens = max(side.tokens for side in run.sides.values())
            said = f"{run.model} reads {tokens:,} tokens here and was trained on {run.beyond:,} at most"
            typer.echo(f"saccade: {said}: what its heads do beyond these nobody measured", err=True)
    return session


def _reads_no_text(model: str) -> bool:
    """Whether this is a run of a task with images, sounds, series or nodes as inputs."""
    from ..make.training.run_folder.layout import TASK

    if not (Path(model) / TASK).is_file():
        return False
    from ..make.tasks import reads_no_text

    return reads_no_text(model)


def _session_of_input(arguments: list[str] | None, shown: ShownOptions, head: tuple[int, int] | None) -> Session:
    """A session for one input of a run, recorded during the model's call."""
    from ..make.tasks import observe
    from ..see.viewer.server import open_session

    runs = shown.model or []
    given = {name: getattr(shown, name) for name in ("against", "target", "context", "weights", "first", "last")}
    for name, value in given.items():
        if value is not None:
            raise UserError(f"--{_NAMES.get(name, name)} needs a text, but {runs[0]} reads other inputs")
    if len(runs) > 1 or shown.generate:
        raise UserError(f"{runs[0]} does not read text: --against and --generate are not supported")
    if not arguments or len(arguments) > 1:
        raise UserError(f"expected one input for {runs[0]}: a file, or a node's name")
    path = Path(arguments[0])
    observed = observe(runs[0], path if path.exists() else arguments[0])
    return open_session(observed.watched, words=observed.words, head=head)


def _subjects(arguments: list[str] | None, shown: ShownOptions) -> list[Any]:
    """The text or watch file to show, and the one to compare it with."""
    from ..see.viewer.server._subjects import is_watch_file

    more = [] if shown.against is None else [shown.against]
    first = arguments[0] if arguments and len(arguments) == 1 else ""
    if not is_watch_file(first):
        for other in filter(is_watch_file, more):
            raise UserError(f"--against {shorten(other, 60)}: a file of watch cannot be compared with a text")
        texts = [given_text(arguments, "view"), *map(text_or_file, more)]
        return [word_range(text, shown.first, shown.last).text for text in texts]
    if (shown.first, shown.last) != (None, None):
        raise UserError("--from and --to need a text; a file of watch is shown whole")
    if shown.context is not None:
        raise UserError("--context needs a text; a file of watch contains a finished call")
    for other in more:
        if not is_watch_file(other):
            raise UserError(f"--against {shorten(other, 60)}: expected another file of watch")
    return [Path(path) for path in (first, *more)]


def _models(subjects: list[Any], shown: ShownOptions) -> list[Any]:
    """Open the models, with enough context for the texts; [] if the subjects are files that `saccade.watch` saved."""
    if isinstance(subjects[0], Path):
        if shown.weights is not None:
            raise UserError("--weights needs a text; a file of watch contains a finished call")
        return list(shown.model or [])
    from ..see.inspection import open_model

    models = [open_model(model) for model in shown.model or (None,)]
    if shown.weights is not None:
        if len(models) > 1:
            raise UserError("--weights compares one --model with itself")
        models.append(open_model(shown.model[0] if shown.model else None, weights=shown.weights))
    if shown.context is not None:
        try:
            models = [model.with_context(shown.context) for model in models]
        except ValueError as error:
            raise UserError(f"--{error}") from error
    for model in models:
        for text in subjects:
            check_length(model, text, shown.first or 1, "--context")
    return models if shown.model or shown.context or shown.weights else []
