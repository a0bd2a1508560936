"""The app of sub-commands. They import PyTorch only when they run, so help and usage errors are fast."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .. import __version__
from . import (
    bench,
    compare,
    diagram,
    distill,
    docs,
    doctor,
    embed,
    generate,
    heads,
    look,
    plan,
    predict,
    prune,
    step,
    test,
    train,
    verify,
    view,
)
from ._options import Group


class _Shell(Group):
    """Exits with status 130 at Ctrl-C, without the empty line that click prints."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Shell,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"saccade {__version__}")
        raise typer.Exit


@app.callback()
def _shell(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Self-attention for PyTorch: look at what a language model attends to, train one of your own, let it write."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMANDS = (
    *(look, view, step, heads, diagram, generate, train, test, predict, distill, embed, prune),
    *(verify, bench, compare, plan, docs, doctor),
)
for command in COMMANDS:
    command.register(app)
