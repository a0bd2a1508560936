"""Runs the app and turns errors that users can fix into one line and an exit status."""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import typer

from ..support._extras import NotInstalled
from ..support._terminal import cleaned_streams
from . import _app
from ._errors import UserError, is_interrupt, one_line, told_by_another

# Seconds that a process waits for the one that reports the same error. torchrun ends all processes when the first one
# has failed: this one, when the error is reported, or else that one before it could report it.
_PATIENCE = 30.0


def run(arguments: Sequence[str] | None, app: typer.Typer | None = None) -> int:
    """Run `saccade`, or another app in the same way."""
    if arguments is None:  # the process itself, not a call from Python
        _open_closed_streams()
    usual = warnings.showwarning
    warnings.showwarning = functools.partial(_show, usual)
    try:
        with cleaned_streams():
            return _run(arguments, app or _app.app)
    finally:
        warnings.showwarning = usual
        if arguments is None:
            gc.freeze()  # otherwise Python visits a million objects twice before it exits


def _open_closed_streams() -> None:
    """Discard output to streams that the shell closed (``>&-``).

    Opens the null device under the number of the stream. Otherwise the next opened file would get that number, and with
    it any output of libraries and child processes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))  # noqa: SIM115, open to the end


def _show(usual: Callable[..., None], message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Show a warning as one line, without its place in the code."""
    if category is UserWarning:
        typer.echo(f"saccade: warning: {' '.join(str(message).split())}", err=True)
    else:
        usual(message, category, *rest)


def _run(arguments: Sequence[str] | None, app: typer.Typer) -> int:
    try:
        status = _command(app).main(arguments, prog_name="saccade", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except typer.Abort:
        return 130
    except (BrokenPipeError, SystemExit) as error:
        if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
            raise  # click catches a broken pipe, too, and exits
        # Drop buffered output that has no reader; otherwise the interpreter raises another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as shells report a process ended by SIGPIPE; 1 would mean a failed `verify`
    except Exception as error:
        if is_interrupt(error):
            return 130
        if os.environ.get("SACCADE_TRACEBACK") or not _fixable(error):
            raise
        if told_by_another():
            time.sleep(_PATIENCE)
            return 2
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.ctx.get_help())  # type: ignore[attr-defined]
        else:
            typer.echo(f"saccade: error: {one_line(error)}", err=True)
        return 2


@functools.cache
def _command(app: typer.Typer) -> Any:
    """The app as click has it: reading annotations takes 40 ms, once for all calls from Python."""
    return typer.main.get_command(app)


def _fixable(error: Exception) -> bool:
    # Usage errors are known by their method: they are click's own or typer's copy of it, by typer's version.
    fixable = (UserError, NotInstalled, ValueError, TypeError, OSError)
    return isinstance(error, fixable) or hasattr(error, "format_message")
