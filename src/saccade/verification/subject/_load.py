"""The target that a string names: "path/to/file.py:Name" or "hf:DIR_OR_ID". The file's code is run by this, as pytest
runs tests: call it only in the process that may."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ...support._registered import registered
from ..findings._finding import Undecided
from ..findings._words import shown_path
from ._shortened import LoadedModel


def load(named: str) -> Any:
    """Import the file and give the function, class or instance of that name.

    Without a name the file must hold one thing that looks like attention.

    Raises:
        ValueError: no such file or name; the message lists what is there.
        Undecided: no name is given, and several things could be meant.
    """
    if named.startswith("hf:"):
        return LoadedModel(*registered("verified_models").load(named.removeprefix("hf:")))
    path, name = split(named)
    module = _imported(path)
    return _named(module, path, name) if name else _only(module, path)


def split(named: str) -> tuple[Path, str]:
    """The file and the name, "" without one.

    Raises:
        ValueError: not of this form, or no such file.
    """
    path, colon, name = named.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:  # no name; C:\file.py has a colon of its own
        path, name = named, ""
    file = Path(path).expanduser()
    if file.suffix != ".py":
        raise ValueError(f'target {named!r}: expected "path/to/file.py:Name" or "hf:DIR_OR_ID"')
    if not file.is_file():
        near = sorted(other.name for other in file.parent.glob("*.py")) if file.parent.is_dir() else []
        there = f"; the folder holds {', '.join(near[:8])}" if near else ""
        raise ValueError(f"target {named!r}: there is no file {path}{there}")
    return file.resolve(), name


# Importing


def _imported(path: Path) -> ModuleType:
    """The file as a module. In a package it is imported under its full name, so that relative imports hold."""
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        folder, name = folder.parent, f"{folder.name}.{name}"
    sys.path.insert(0, str(folder))
    sys.argv = [str(path)]
    if "." in name:
        module = importlib.import_module(name.removesuffix(".__init__"))
        if module.__file__ is not None and Path(module.__file__).resolve() == path:
            return module
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"_verified_{path.stem}"  # a file of the user's may be called as one that Python needs
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _named(module: ModuleType, path: Path, name: str) -> Any:
    try:
        value = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        there = ", ".join(_candidates(module)) or "nothing that looks like attention"
        raise ValueError(f"target {shown_path(str(path))}:{name}: there is no {name} in it; it holds {there}") from None
    if not callable(value):
        kind = type(value).__name__
        raise ValueError(
            f"target {shown_path(str(path))}:{name}: it is of type {kind}; expected a function, an nn.Module or a class"
        )
    return value


def _only(module: ModuleType, path: Path) -> Any:
    names = _candidates(module)
    if len(names) == 1:
        return getattr(module, names[0])
    if not names:
        raise ValueError(f"target {shown_path(str(path))}: nothing in it looks like attention; name it as {path}:Name")
    raise Undecided(
        f"target {shown_path(str(path))}: several things in it could be meant",
        [(_kind(getattr(module, name)), f"{shown_path(str(path))}:{name}") for name in names],
    )


def _kind(result: Any) -> str:
    return "class" if inspect.isclass(result) else "function" if inspect.isroutine(result) else "instance"


def _candidates(module: ModuleType) -> list[str]:
    """Possible attention in a module: instances, classes, and functions with three inputs or a telling name, defined
    there."""
    return [name for name, value in vars(module).items() if not name.startswith("_") and _may_be(value, name, module)]


def _may_be(result: Any, name: str, module: ModuleType) -> bool:
    if isinstance(result, nn.Module):
        return True
    if getattr(result, "__module__", None) != module.__name__:
        return False
    if inspect.isclass(result):
        return issubclass(result, nn.Module)
    if not inspect.isfunction(result):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    inputs = [parameter for parameter in inspect.signature(result).parameters.values() if parameter.kind in kinds]
    first = "".join(parameter.name[:1].lower() for parameter in inputs[:3])
    return ("att" in name.lower() and len(inputs) > 0) or first == "qkv"
