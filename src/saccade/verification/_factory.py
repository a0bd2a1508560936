"""Stacks that a string names: "path/to/stack.py:make", a function without arguments that returns what is verified."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from ._verify_stack import StackReport, verify_stack
from .subject._load import load, split

_NAMES = tuple(inspect.signature(verify_stack).parameters)


def is_factory(named: str) -> bool:
    """Whether the file's function of this name takes no arguments: it can only make a stack. The file is not run."""
    try:
        path, name = split(named)
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (ValueError, SyntaxError, OSError):  # which verifying a module reports
        return False
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return bool(functions) and not any(
        [functions[-1].args.posonlyargs, functions[-1].args.args, functions[-1].args.vararg]
    )


def verify_made(named: str, **promises: Any) -> StackReport:
    """The report on the stack that the function of this name returns."""
    make = load(named)
    make = getattr(make, "__wrapped__", make) if getattr(make, "is_verified", False) else make
    given = {name: value for name, value in promises.items() if value is not None}
    return verify_returned(make(), named, **given)


def verify_returned(made: Any, named: str, **arguments: Any) -> StackReport:
    """The report on a stack: a model, a dict of `verify_stack`'s arguments, or a tuple of them in their order.
    `arguments` are further ones.

    Raises:
        ValueError: it is something else; the message says what `named` returned.
    """
    given = dict(made) if isinstance(made, Mapping) else {"model": made}
    if isinstance(made, tuple):
        given = dict(zip(_NAMES, made, strict=False))
    given |= arguments
    unknown = sorted(map(str, set(given) - set(_NAMES)))
    if unknown or (given.get("model") is None and given.get("trainer") is None):
        wrong = f"unknown {', '.join(unknown)}" if unknown else "no model"
        raise ValueError(f"{named}: expected a dict with model and any of {', '.join(_NAMES[1:])}; got {wrong}")
    return verify_stack(given.pop("model", None), **given)
