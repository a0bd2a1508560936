"""Fields of dataclasses as options: of a command line, and of a class in Python. Imports no PyTorch and no typer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
LAST = ("Classes", "Model")  # groups that follow the others in help


@dataclasses.dataclass(frozen=True)
class OptionText:
    """The help of an option, other than its default.

    Args:
        help: a sentence.
        names: such as "--cased/--no-cased"; without them the field's name gives the option's.
        group: heading in help; "" is the `_heading` of the dataclass, or its docstring.
        before: the option that follows it in help; "" leaves the order of the fields.
        settings: what else `typer.Option` takes, such as `metavar`.
    """

    help: str
    names: tuple[str, ...] = ()
    group: str = ""
    before: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def option(default: T, help: str, *names: str, group: str = "", before: str = "", **settings: Any) -> T:
    """A dataclass field that is an option. Arguments as of `OptionText`; a flag takes no value."""
    text = OptionText(help, names, group, before, settings)
    field: Any = dataclasses.field(default=default, metadata={"option": text})
    return field


def option_fields(options: type) -> list[tuple[dataclasses.Field[Any], str]]:
    """The fields of a dataclass that are options, each with its heading, in the order of help."""
    fields = [field for field in dataclasses.fields(options) if "option" in field.metadata]
    for field in [field for field in fields if field.metadata["option"].before]:
        fields.remove(field)
        fields.insert([other.name for other in fields].index(field.metadata["option"].before), field)
    usual: str = getattr(options, "_heading", options.__doc__ or "")
    grouped = [(field, field.metadata["option"].group or usual) for field in fields]
    ranks = {group: rank for rank, group in enumerate(LAST, 1)}
    return sorted(grouped, key=lambda pair: ranks.get(pair[1], 0))
