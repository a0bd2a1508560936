"""Files that a command line names. They are looked for before the command imports PyTorch, which takes seconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ._errors import UserError

_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MODEL = "a folder with config.json, weights and tokenizer, or a name on the Hugging Face hub such as org/name"


def existing(
    expected: str = "",
    *,
    kind: str = "file or folder",
    named: Callable[[str], Path | None] = Path,
    exists: Callable[[Path], bool] = Path.exists,
) -> Callable[..., Any]:
    """A callback for typer that raises a UserError where an argument or an option names a file that is missing.

    Args:
        expected: what the value should be; "" takes the first sentence of an argument's help.
        kind: what is missing.
        named: the path that a value names, None where it names none.
        exists: whether it is there.
    """

    def check(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
        given = value if isinstance(value, list) else [] if value is None else [value]
        unquoted = parameter.param_type_name == "argument" and len(given) > 1  # words of a text, which lacks quotes
        for one in () if unquoted or context.resilient_parsing else given:  # resilient: for completion in a shell
            path = named(str(one))
            if path is not None and _is_missing(path.expanduser(), exists):
                raise UserError(f"{_label(parameter)} {one}: no such {kind}{_near(path)}; expected {words(parameter)}")
        return value

    def words(parameter: typer.CallbackParam) -> str:
        help = parameter.help.partition(". ")[0].rstrip(".")  # type: ignore[attr-defined]
        return expected or help[0].lower() + help[1:]

    return check


def existing_data() -> Callable[..., Any]:
    """Of data for a task: a file, a folder, or what the names of two aligned files begin with."""
    return existing(exists=lambda path: path.exists() or any(n.startswith(f"{path.name}.") for n in _neighbours(path)))


def existing_model(named: Callable[[str], Path | None] | None = None) -> Callable[..., Any]:
    """Of a model's folder, or a name on the hub, which only the hub knows."""
    return existing(MODEL, kind="model folder", named=named or model_folder)


def model_folder(source: str) -> Path | None:
    """The folder that `source` names; None where it may be a name on the hub."""
    return None if _HUB_ID.fullmatch(source) else Path(source)


def _label(parameter: typer.CallbackParam) -> str:
    return parameter.opts[0] if parameter.param_type_name == "option" else str(parameter.metavar)


def _is_missing(path: Path, exists: Callable[[Path], bool]) -> bool:
    try:
        return not exists(path)
    except (OSError, ValueError):  # impossible as a name: whoever reads it says so
        return False


def _near(path: Path) -> str:
    """A name beside it that is nearly the same; a common ending alone makes none so."""
    near = difflib.get_close_matches(path.name, _neighbours(path), 1, cutoff=0.75)
    return f" (did you mean {path.with_name(near[0])}?)" if near else ""


def _neighbours(path: Path) -> list[str]:
    try:
        return sorted(one.name for one in path.expanduser().parent.iterdir())
    except OSError:  # no such folder, or one that must not be listed
        return []
