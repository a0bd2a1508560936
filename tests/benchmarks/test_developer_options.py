"""What is for those who work on the kernels: `benchmarks/attention.py` and `benchmarks/compare_tasks.py`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from saccade.benchmark import tasks
from saccade.cli import _run

FOLDER = Path(__file__).parents[2] / "benchmarks"
TINY = "--threads 1 --seconds 0 --rounds 1 --batch 2 --heads 2 --width 8 --against sdpa,dense".split()


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


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "status"), [(1.0, 3), (0.0, 0)])
def test_targets_are_judged(monkeypatch, capsys, load, factor, status):
    from saccade.benchmark.attention import Case, Entry, SaccadeAttention, SdpaAttention

    monkeypatch.syspath_prepend(FOLDER)
    import kernel_targets

    case = Case(32, 32)

    def two(preset):
        assert (preset.subject, preset.choice, preset.lower) == ("chunked", "auto", "avx2")
        entries = (Entry(case, SaccadeAttention(preset.subject)), Entry(case, SdpaAttention()))
        return [
            kernel_targets.PerformanceTarget("one thing", entries, (kernel_targets.SpeedupRequirement(99.0 * factor),)),
            kernel_targets.PerformanceTarget("other thing", entries, ()),
        ]

    monkeypatch.setattr(kernel_targets, "targets", two)
    assert load("attention")(*TINY, "--targets", "--only", "one", "--backend", "chunked,auto") == status
    out = capsys.readouterr().out
    assert "other thing" not in out
    assert f"{int(factor == 0)} of 1 targets are met." in out


@pytest.mark.slow
def test_targets_run_as_they_are(load, capsys):
    given = ["--targets", "--backend", "chunked,auto", "--only", "L=16 B=4 float32 auto"]
    assert load("attention")(*TINY[:4], "--rounds", "1", *given) in (0, 3)
    assert "of 4 targets are met." in capsys.readouterr().out


@pytest.mark.slow
def test_one_thread_s_own_time(load, capsys):
    assert load("attention")(*TINY, "--length", "32", "--backend", "auto", "--clock", "cpu", "--json", "-") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["clock"] == "cpu"
    assert settings["command"].startswith("python benchmarks/attention.py")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--clock sun", "clock must be one of wall, cpu"),
        ("--targets --only nonsense", "only: no target has the words nonsense"),
    ],
)
def test_bad_input_is_one_line(load, given, words, capsys):
    assert load("attention")(*TINY, "--length", "32", *given.split()) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err
    assert len(told.err.splitlines()) == 1


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
