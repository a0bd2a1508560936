"""What a user may do wrong, as one line each."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping

from ..support._extras import NotInstalled


class UserError(Exception):
    """Something the user can fix. The message is printed as it stands, without a traceback."""


def require(module: str, extra: str) -> None:
    """Ask for an optional dependency before any work is done.

    Raises:
        NotInstalled: `module` is not there; the message is the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise NotInstalled("this", module, extra)


def told_by_another() -> bool:
    """Whether another process on this machine (`torchrun`) tells the same: none has joined it yet, so it is the words
    of the command that are wrong, which all have been given."""
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


def with_options(message: str, options: Mapping[str, str]) -> str:
    """A message of the library in the words of a command line: `rate: must be` becomes `--rate: must be`, and `past=3`
    becomes `--past 3`.

    Args:
        options: what a name of the library's is called there. One of several words, such as skip_empty, is known
            anywhere in a message; another could be a word of it.
    """
    names = "|".join(map(re.escape, options))
    several = "|".join(re.escape(name) for name in options if "_" in name) or "(?!)"

    def named(match: re.Match[str]) -> str:
        return options[match[1]]

    begin = re.match(rf"(?:(?:{names})(?:, |(?=:)))+: ", message)
    start = 0 if begin is None else begin.end()
    first, rest = re.sub(rf"\b({names})\b", named, message[:start]), message[start:]
    before, after = r"(?<![\w'./-])", r"(?![\w'./=-])"  # of no path, no quoted word, no option

    def outside(text: str) -> str:
        text = re.sub(rf"{before}({names})='?(?=\w)([^' ,;)]+)'?", lambda found: f"{named(found)} {found[2]}", text)
        return re.sub(rf"{before}({several}){after}", named, text)

    parts = re.split(r"([\w.]+\([^()]*\))", rest)  # calls in Python, which stand at odd places, keep their words
    return first + "".join(part if n % 2 else outside(part) for n, part in enumerate(parts))


def _joined(message: str) -> str:
    return " ".join(message.split())
