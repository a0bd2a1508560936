"""Checks that files on the command line exist, before the command imports PyTorch, which takes seconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from .._errors import UserError

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MODEL = "a folder with config.json, weights and tokenizer, or a name on the Hugging Face hub such as org/name"


def existing(
    expected: str = "",
    *,
    kind: str = "file or folder",
    named: Callable[[str], Path | None] = Path,
    exists: Callable[[Path], bool] = Path.exists,
) -> Callable[..., Any]:
    """A callback for typer that raises UserError if an argument or option names a missing file.

    Args:
        expected: description of the value; "" takes the first sentence of the argument's help.
        kind: word for the missing item.
        named: the path in a value; None if the value is not a path.
        exists: whether a path exists.
    """

    def check(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        given = value if isinstance(value, list) else [] if value is None else [value]
        unquoted = parameter.param_type_name == "argument" and len(given) > 1  # words of a text, which lacks quotes
        for name in () if unquoted or context.resilient_parsing else given:  # resilient: for completion in a shell
            path = named(str(name))
            if path is not None and _is_missing(path.expanduser(), exists):
                raise UserError(f"{_label(parameter)} {name}: no such {kind}{_near(path)}; expected {words(parameter)}")
        return value

    def words(parameter: typer.CallbackParam) -> str:
        help = parameter.help.partition(". ")[0].rstrip(".")  # type: ignore[attr-defined]
        return expected or help[0].lower() + help[1:]

    return check


def existing_data() -> Callable[..., Any]:
    """Callback for data of a task: a file, a folder, or the common prefix of two aligned files."""
    return existing(exists=lambda path: path.exists() or any(n.startswith(f"{path.name}.") for n in _neighbours(path)))


def existing_model(named: Callable[[str], Path | None] | None = None) -> Callable[..., Any]:
    """Callback for a model's folder; names on the hub are not checked."""
    return existing(MODEL, kind="model folder", named=named or model_folder)


def model_folder(source: str) -> Path | None:
    """The folder named by `source`; None if it may be a name on the hub."""
    return None if _HUB_ID.fullmatch(source) else Path(source)


def _label(parameter: typer.CallbackParam) -> str:
    return parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.metavar)


def _is_missing(path: Path, exists: Callable[[Path], bool]) -> bool:
    try:
        return not exists(path)
    except (OSError, ValueError):  # impossible as a file name: the command itself reports it
        return False


def _near(path: Path) -> str:
    """Advice with a similar name in the same folder, if there is one; file endings do not count."""
    near = difflib.get_close_matches(path.name, _neighbours(path), 1, cutoff=0.75)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def _neighbours(path: Path) -> list[str]:
    try:
        return sorted(path.name for path in path.expanduser().parent.iterdir())
    except OSError:  # no such folder, or no permission
        return []
