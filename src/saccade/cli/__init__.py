"""The command `saccade`: an app of sub-commands, and the boundary where errors become one line.

Exit status: 0 done, 1 errors found by `verify` or nothing that it could test, 2 something the user can mend (one line
on stderr), 130 interrupted by Ctrl-C, 1 also where the reader of a pipe left. Anything else that is raised is a bug of
ours and keeps its traceback. SACCADE_TRACEBACK=1 keeps every one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from . import bench, compare, generate, look, train, verify
from ._errors import UserError, one_line, require, told_by_another

__all__ = ["UserError", "app", "main", "require"]

EXAMPLES = """
Examples:

  saccade look "I will go if you will go with me."

  saccade generate "It was a dark night"

  saccade train lm my-novel.txt --out runs/novel

  saccade verify attention.py:SelfAttention --arg embed_dim=64

  saccade bench --quick

  saccade compare --quick
"""

app = typer.Typer(
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


for command in (look, generate, train, verify, bench, compare):
    command.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when `arguments` is None) and return the exit status."""
    try:
        status = typer.main.get_command(app).main(arguments, prog_name="saccade", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # What is still buffered has no reader: without this the interpreter complains once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("SACCADE_TRACEBACK") or not _mendable(error):
            raise
        if told_by_another():
            return 2
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.ctx.get_help())  # type: ignore[attr-defined]
        else:
            typer.echo(f"saccade: error: {one_line(error)}", err=True)
        return 2


def _mendable(error: Exception) -> bool:
    # Usage errors are known by their method: they are click's own or typer's copy of it, by typer's version.
    return isinstance(error, (UserError, ValueError, TypeError, OSError)) or hasattr(error, "format_message")
