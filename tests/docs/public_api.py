"""The public names with their signatures, as text. `python tests/docs/public_api.py` renews public_api.txt.

Annotations stand as they are written, and nothing of Python or PyTorch is listed, so every version of them gives the
same text.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public

SNAPSHOT = Path(__file__).with_name("public_api.txt")


def text() -> str:
    lines: list[str] = []
    homes = public.homes()
    for package, name, value in public.every_name():
        home = homes[package, name]
        path = f"{package}.{name}"
        lines += described(path, value) if home == package else [f"{path} is {home}.{name}"]
    lines += [f"deprecated {package}.{old}, now {new}" for package, old, new in public.old_names()]
    return "".join(f"{line}\n" for line in lines)


def described(path: str, value: Any) -> list[str]:
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__mro__[1:] if base in public_classes())
        return [f"class {path}{signature(value)}{bases and f' extends {bases}'}", *members(path, value)]
    if typing.get_origin(value) is not None:
        return [f"alias {path}"]
    if callable(value):
        return [f"def {path}{signature(value)}"]
    if isinstance(value, types.ModuleType):
        return [f"module {path}"]
    return [f"{path}: {type(value).__name__}"]


def members(path: str, owner: type) -> Iterator[str]:
    """Public methods, properties and attributes that the class defines, or a base of Saccade's that is not public."""
    fields = parameters_of(owner)
    found: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        if base is owner or (ours(base) and base not in public_classes()):
            found |= vars(base)
    for name in sorted(found):
        if (name == "__call__" or not name.startswith("_")) and not promised_before(owner, name, found[name]):
            yield from member(f"{path}.{name}", found[name], field=name in fields)


def promised_before(owner: type, name: str, value: Any) -> bool:
    """Whether a public base has the member already, called in the same way: its line is the promise of both."""
    theirs = [vars(base)[name] for base in owner.__mro__[1:] if base in public_classes() and name in vars(base)]
    return bool(theirs) and way_to_call(theirs[0]) == way_to_call(value)


def way_to_call(value: Any) -> tuple[Any, ...]:
    """The kind of a member, and its parameters without their annotations, which an override may narrow."""
    function = getattr(value, "__func__", value)
    if not inspect.isfunction(function):
        return ()  # of a property, or an attribute: it is read
    parameters = inspect.signature(function).parameters.values()
    return (type(value), *((each.name, each.kind, default_of(each.default)) for each in parameters))


def member(path: str, value: Any, *, field: bool) -> list[str]:
    if isinstance(value, property):
        return [f"property {path}{returned(value.fget)}"]
    if isinstance(value, (staticmethod, classmethod)):
        return [f"{type(value).__name__} {path}{signature(value.__func__)}"]
    if isinstance(value, enum.Enum):
        return [f"{path} = {value.value!r}"]
    if inspect.isfunction(value):
        return [f"def {path}{signature(value)}"]
    # The signature of the class lists its fields; the attributes of other classes have their name alone.
    return [] if field or inspect.isdatadescriptor(value) else [path]


def ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "saccade"


@functools.cache
def public_classes() -> frozenset[type]:
    return frozenset(value for _, _, value in public.every_name() if isinstance(value, type))


def parameters_of(owner: type) -> set[str]:
    try:
        return set(inspect.signature(owner).parameters)
    except (TypeError, ValueError):
        return set()


def signature(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, (enum.Enum, BaseException)) and "__init__" not in vars(value):
        return ""  # made by Python, and another one in each version
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [shown(parameter) for parameter in found.parameters.values()]
    kinds = [parameter.kind for parameter in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        parameters.insert(len(kinds) - kinds[::-1].index(inspect.Parameter.POSITIONAL_ONLY), "/")
    return f"({', '.join(parameters)}){returned(value)}"


def shown(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = "" if parameter.annotation is parameter.empty else f": {written(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f" = {default_of(parameter.default)}"
    return f"{stars}{parameter.name}{annotation}{default}"


def returned(value: Any) -> str:
    if value is None or isinstance(value, type):
        return ""
    annotation = inspect.signature(value).return_annotation
    return "" if annotation is inspect.Signature.empty else f" -> {written(annotation)}"


def written(annotation: Any) -> str:
    """An annotation as its source has it."""
    if isinstance(annotation, typing.ForwardRef):  # of a NamedTuple, before Python 3.14
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def default_of(value: Any) -> str:
    if isinstance(value, type) or inspect.isfunction(value):
        return value.__qualname__
    return type(value).__name__ if " at 0x" in repr(value) else repr(value)


if __name__ == "__main__":
    SNAPSHOT.write_text(text(), encoding="utf-8")
