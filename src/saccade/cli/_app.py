"""The app of sub-commands. Their modules import what computes when they run: help and usage errors need no PyTorch."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
    predict,
    prune,
    step,
    test,
    train,
    verify,
    view,
)

EXAMPLES = """
Examples:

  saccade look "I will go if you will go with me."

  saccade view my-novel.txt

  saccade diagram attention --text "She said it was cold" --out attention.svg

  saccade step "The cat sat because it was soft." --word it

  saccade heads "The cat sat on the mat. The cat sat on the" --why the:2 mat

  saccade generate "It was a dark night"

  saccade train lm my-novel.txt --out runs/novel

  saccade train classify reviews.csv --out runs/reviews

  saccade test runs/reviews test.csv

  saccade distill runs/reviews layers=1 reviews.csv --out runs/smaller

  saccade predict runs/reviews "a film to remember"

  saccade embed texts.txt --model MODEL_FOLDER --out vectors.npy

  saccade prune MODEL_FOLDER --keep .5 --data my-novel.txt --out smaller

  saccade verify attention.py:SelfAttention --arg embed_dim=64

  saccade bench --quick

  saccade compare --quick

  saccade docs window mask

  saccade doctor
"""


class _Shell(TyperGroup):
    """Ctrl-C is exit status 130 and nothing else; click would print an empty line."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Shell,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXAMPLES,
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
    *(verify, bench, compare, docs, doctor),
)
for command in COMMANDS:
    command.register(app)
