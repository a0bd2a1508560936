"""`saccade docs`."""

from __future__ import annotations

from typing import Annotated

import typer

from ._errors import UserError
from ._options import GroupedCommand

_BUILDING = "saccade: building the pages, which takes half a minute"


def register(app: typer.Typer) -> None:
    app.command("docs", cls=GroupedCommand, short_help="Open the documentation of this version.")(docs)


def docs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORDS",
            help="The page to open: a command, a public name, or words about a subject.",
            show_default=False,
        ),
    ] = None,
    path: Annotated[bool, typer.Option("--path", help="Print the page's file and do not open it.")] = False,
    build: Annotated[
        bool, typer.Option("--build", help="Rebuild the pages from a source checkout; this takes half a minute.")
    ] = False,
) -> None:
    """Open the documentation of the installed version in the browser, without a network."""
    import webbrowser

    from .. import __version__
    from ..support._documentation import built_site, search

    try:
        site = built_site(__version__, anew=build, begin=lambda: typer.echo(_BUILDING, err=True))
    except RuntimeError as error:
        raise UserError(str(error)) from None
    hits = search(site, " ".join(words)) if words else []
    if words and not hits:
        raise UserError(
            f"{' '.join(words)}: no page has these words or similar ones; saccade docs alone opens the start page"
        )
    place, _, anchor = (hits[0].place if hits else "index.html").partition("#")
    file = site / place
    if path:
        typer.echo(file)
        return
    address = file.as_uri() + (f"#{anchor}" if anchor else "")
    if hits and not hits[0].whole:
        typer.echo(f"No page has all of {' '.join(words or [])!r}; this is the nearest.")
    for hit in hits:
        typer.echo(f"{'Page' if hit is hits[0] else 'Also'}: {hit}")
    typer.echo(address)
    if not webbrowser.open(address):
        typer.echo("No browser was found; open this address in one.", err=True)
