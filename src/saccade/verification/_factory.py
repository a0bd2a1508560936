"""Stacks that a string names: "path/to/stack.py:make", a function without arguments that returns what is verified."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ._verify_stack import StackReport, stack_report
from .running._stack_job import StackJob
from .subject._load import split

if TYPE_CHECKING:
    from ._verify import Progress
    from .running._child import Limits


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


def verify_made(
    named: str, limits: Limits | None = None, progress: Progress | None = None, **promises: Any
) -> StackReport:
    """The report on the stack that the function of this name returns. It is made and verified in a child process."""
    from .running._child import Limits, isolated

    given = {name: value for name, value in promises.items() if value is not None}
    job = StackJob(named, given)
    return stack_report(isolated(job, limits or Limits()), named, progress, len(job.names))
