"""`saccade compare --task`, as a user calls it."""

from __future__ import annotations

import json

import pytest

from saccade.benchmark import tasks
from saccade.benchmark.tasks import TrainingBudget, load, training
from saccade.cli import main

QUICK = ["--steps", "2", "--rates", ".01"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few held-out examples, so that a run takes a moment."""
    monkeypatch.setattr(tasks, "TrainingBudget", lambda **options: TrainingBudget(**{"held": 8, "batch": 2, **options}))


def compare(*arguments: str) -> int:
    return main(["compare", *arguments])


@pytest.mark.slow
def test_the_tables_of_two_tasks(capsys, tmp_path):
    page = tmp_path / "tasks.md"
    assert compare("--task", "needle,copy", "--mechanism", "linear:head=4", *QUICK, "--markdown", str(page)) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert page.read_text().startswith(
        "# What each mechanism solves\n\n    saccade compare --task copy,needle --steps 2 --rates 0.01\n"
    )
    assert page.read_text().endswith(told.out)
    assert told.out.splitlines()[0] == "| mechanism | copy | needle |"
    assert [line for line in told.out.splitlines() if line.startswith("#")] == ["## copy", "## needle"]
    assert "- linformer: " in told.out and "- nystrom: " in told.out
    assert "| linear:head=4 | 264 |" in told.out  # 2 layers of 4 features times 32 values and their sum


@pytest.mark.slow
def test_what_is_recorded_is_not_run_again(capsys, tmp_path, monkeypatch):
    records = tmp_path / "runs.jsonl"
    given = ["--task", "induction", "--mechanism", "GRU", *QUICK, "--records", str(records)]
    assert compare(*given, "--seeds", "1") == 0
    first = capsys.readouterr().out
    assert [(row.mechanism, row.case["seed"]) for row in load(records)] == [("exact", 0), ("GRU", 0)]
    before = records.read_text()
    assert compare(*given, "--seeds", "2") == 0
    assert records.read_text().startswith(before)
    assert [(row.mechanism, row.case["seed"]) for row in load(records)][2:] == [("exact", 1), ("GRU", 1)]
    capsys.readouterr()
    monkeypatch.setattr(training, "_train", None)  # nothing may be trained now
    assert compare(*given) == 0
    assert capsys.readouterr().out == first
    assert compare("--task", "induction", "--read", str(records), "--json", "-") == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["mechanism"] for run in told["runs"]] == ["exact", "GRU", "exact", "GRU"]
    assert told["runs"][0]["seed"] == 0 and 0 <= told["runs"][0]["right"] <= 1


def test_networks_can_be_left_out(capsys):
    assert compare("--task", "copy", "--mechanism", "GRU", "--mechanism", "linear", "--no-layers", *QUICK) == 0
    out = capsys.readouterr().out
    assert "| linear |" in out and "GRU" not in out


def test_the_same_seed_gives_the_same_table(capsys):
    given = ["--task", "recall", "--mechanism", "linear", *QUICK, "--seed", "5", "--json", "-"]
    found = []
    for _ in range(2):
        assert compare(*given) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        found.append([{key: value for key, value in run.items() if "seconds" not in key} for run in runs])
    assert found[0] == found[1]
    assert {run["seed"] for run in found[0]} == {5}


def test_an_interrupt_keeps_what_is_done(capsys, tmp_path, monkeypatch):
    records, real = tmp_path / "runs.jsonl", training._train

    def stop_at_the_third(*given):
        if len(load(records)) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(training, "_train", stop_at_the_third)
    assert compare("--task", "copy", *QUICK, "--records", str(records)) == 130
    assert [row.mechanism for row in load(records)] == ["exact", "window:size=8"]
    out = capsys.readouterr().out
    assert "| exact |" in out and "| window:size=8 |" in out


@pytest.mark.slow
def test_a_figure_is_drawn_from_records(tmp_path):
    records, plot = tmp_path / "runs.jsonl", tmp_path / "recall.svg"
    assert compare("--task", "recall", "--mechanism", "linear", *QUICK, "--records", str(records)) == 0
    assert compare("--task", "all", "--read", str(records), "--plot", str(plot)) == 0
    assert b"numbers kept" in plot.read_bytes()
    assert plot.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "sorting"], "task: expected copy, duplication, recall, induction, needle or all; got 'sorting'"),
        (["--task", "copy", "--mechanism", "nystrom"], "mechanism: nystrom cannot read in order, since"),
        (["--task", "copy", "--mechanism", "x"], "mechanism: expected one of exact, window:size=N, linear"),
        (["--task", "copy", "--steps", "0"], "steps: must be at least 1, got 0"),
        (["--task", "copy", "--seeds", "0"], "seeds: must be at least 1, got 0"),
        (["--task", "copy", "--rates", "fast"], "rates: expected float numbers separated by commas, got 'fast'"),
        (["--task", "copy", "--plot", "x.pdf"], "plot: expected a file that ends in .png or .svg, got x.pdf"),
        (["--task", "copy", "--random", "1,2,8"], "random: tasks bring data of their own"),
        (["--task", "copy", "--lengths", "4k"], "lengths: tasks are of one length, and trained, not timed"),
        (["--task", "copy", "--rounds", "4"], "rounds: tasks are of one length, and trained, not timed"),
        (["--steps", "3"], "steps: is for tasks (--task)"),
        (["--task", "copy", "--read", "nowhere.jsonl"], "read nowhere.jsonl: no such file; expected a file that"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys):
    assert compare(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"saccade: error: --{message}") and told.err.count("\n") == 1


def test_records_without_the_task_are_named(tmp_path, capsys):
    records = tmp_path / "runs.jsonl"
    records.write_text("\n")
    assert compare("--task", "copy,needle", "--read", str(records)) == 2
    assert capsys.readouterr().err == f"saccade: error: --read: {records} has no run of copy, needle\n"
