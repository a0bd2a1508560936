"""Examples in docstrings run and print what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import saccade
from slowly import slow_but

SOURCES = Path(saccade.__file__).parent
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules_with_examples() -> list[str]:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SOURCES.parent).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Accelerate keeps device and precision for the life of the process, and examples train."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def below_assignments(module: ModuleType) -> Iterator[doctest.DocTest]:
    """The examples of constants and aliases, in strings that only a reader of the source sees."""
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    for before, after in pairwise(body):
        if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            text = inspect.cleandoc(ast.literal_eval(after.value)) if isinstance(after.value, ast.Constant) else ""
            name = f"{module.__name__}, line {after.lineno}"
            yield doctest.DocTestParser().get_doctest(text, vars(module).copy(), name, module.__file__, after.lineno)


SLOW = {  # they train, study or verify
    f"saccade.{name}"
    for name in (
        *("make.tasks._compression._distill", "make.tasks._compression._prune", "make.tasks._runs._seeds"),
        *("make.tasks._searching._result", "make.tasks._searching._search", "see.analysis._probe"),
        *("make.models.transformers_model", "make.tasks._runs._testing", "make.tasks._runs._training"),
        *("see.analysis._compare", "verification._verified", "verification._verify"),
    )
}


@pytest.mark.parametrize("name", slow_but(names := modules_with_examples(), *sorted({*names} - SLOW)[::2]))
def test_examples_print_what_they_say(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, runner = importlib.import_module(name), doctest.DocTestRunner(optionflags=OPTIONS)
    for example in (*doctest.DocTestFinder(exclude_empty=True).find(module), *below_assignments(module)):
        runner.run(example)
    assert runner.tries and not runner.failures
