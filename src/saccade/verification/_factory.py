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
    """The report on the stack that the function returns: a model, a dict of `verify_stack`'s arguments, or a tuple of
    them in their order.

    Raises:
        ValueError: it returned something else; the message says what.
    """
    made = load(named)()
    given = dict(made) if isinstance(made, Mapping) else {}
    if isinstance(made, tuple):
        given = dict(zip(_NAMES, made, strict=False))
    elif not given:
        given = {"model": made}
    unknown = sorted(set(given) - set(_NAMES))
    if unknown or "model" not in given:
        wrong = f"unknown {', '.join(unknown)}" if unknown else "no model"
        raise ValueError(f"{named}: expected a dict with model and any of {', '.join(_NAMES[1:])}; got {wrong}")
    model = given.pop("model")
    return verify_stack(model, **given | {name: value for name, value in promises.items() if value is not None})
