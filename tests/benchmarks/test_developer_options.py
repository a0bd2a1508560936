"""What `saccade compare` leaves to `benchmarks/compare_tasks.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from saccade.benchmark import tasks
from saccade.cli import _run

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """A script of this name as a function of its arguments."""

    def loaded(name: str):
        monkeypatch.syspath_prepend(FOLDER)
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up by name
        spec.loader.exec_module(module)
        return lambda *arguments: _run.run(arguments, module.app)

    return loaded


def test_tasks_without_a_convolution(load, capsys, monkeypatch, tmp_path):
    small = tasks.TrainingBudget
    monkeypatch.setattr(tasks, "TrainingBudget", lambda **options: small(**{"held": 8, "batch": 2, **options}))
    script, page = load("compare_tasks"), tmp_path / "tasks.md"
    given = ["--task", "copy", "--mechanism", "linear", "--steps", "2", "--rates", ".01", "--markdown", str(page)]
    assert script(*given, "--taps", "0") == 0
    assert "no convolution" in page.read_text()
    capsys.readouterr()
    assert script(*given, "--taps", "-1") == 2
    assert "taps: must be at least 0, got -1" in capsys.readouterr().err
