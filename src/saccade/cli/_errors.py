"""Errors of users, as one line each."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping

from ..support._extras import NotInstalled


class UserError(Exception):
    """An error that the user can fix. The message is printed as it is, without a traceback."""


def require(module: str, extra: str) -> None:
    """Ask for an optional dependency before any work is done.

    Raises:
        NotInstalled: `module` is not there; the message is the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise NotInstalled("this", module, extra)


def told_by_another() -> bool:
    """Whether another process of `torchrun` on this machine reports the same error. The processes have not joined yet,
    so the error is in the command line, which all of them have."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    import torch.distributed as distributed

    return not (distributed.is_available() and distributed.is_initialized())


def is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused `error`: modules of C or C++ that are interrupted on their import say ImportError."""
    if not isinstance(error, (ImportError, SystemError)):
        return False
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def one_line(error: BaseException) -> str:
    """The message of `error` on a single line: an OSError as `path: reason`, a usage error with where help is."""
    context = getattr(error, "ctx", None)
    if context is not None:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return f"{_joined(message).rstrip('.')} (see {context.command_path} --help)"
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        return reason if error.filename is None else f"{error.filename}: {reason}"
    return _joined(str(error)) or type(error).__name__


def naming_options(message: str, options: Mapping[str, str]) -> str:
    """An error of the library about its arguments, `rate, low: ...`, as one about options: `--rate, --low: ...`. In the
    rest, `overwrite=True` becomes `--overwrite`.

    Args:
        options: of the command, by the arguments' names.
    """
    arguments, colon, reason = message.partition(": ")
    names = arguments.split(", ")
    if not colon or not all(name in options for name in names):
        return message
    reason = re.sub(r"\b(\w+)=True\b", lambda flag: options.get(flag[1], flag[0]), reason)
    return f"{', '.join(options[name] for name in names)}: {reason}"


def _joined(message: str) -> str:
    return " ".join(message.split())
