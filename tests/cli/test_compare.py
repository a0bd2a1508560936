"""`saccade compare`, from the command line to the files it writes."""

from __future__ import annotations

import json

import pytest
import torch

from comparisons import full
from saccade import cli
from saccade.benchmark.attention import Budget
from saccade.benchmark.variants import VariantComparison, measuring as work
from saccade.benchmark.variants.tables import text
from saccade.benchmark.variants.weighing import CallWeight

TINY = "compare --threads 1 --seconds 0 --rounds 1 --random 1,2,8 --lengths 16,32,64".split()


@pytest.fixture(autouse=True)
def nobody_is_weighed(monkeypatch):
    """Weighing takes a process of its own; its tests are elsewhere."""

    def weigh(who, sizes, lengths, limits, threads, seed, told, stop):
        for one in who:
            told(one.name)
        return {one.name: {length: CallWeight(length * 2**10, "", 0.0) for length in lengths} for one in who}

    monkeypatch.setattr(work, "weigh", weigh)
    monkeypatch.setattr(work, "WARM", 0.0)  # nothing is repeated for the clock's sake


@pytest.fixture
def no_work(monkeypatch):
    """Whatever is measured is what stands here; the arguments are told."""
    asked = []

    def measure(comparison, who, data, lengths, settings, told):
        asked.append((who, data, lengths, settings))
        comparison.lines = full().lines

    monkeypatch.setattr(work, "measure", measure)
    monkeypatch.setattr("saccade.benchmark.variants.distance.paths", lambda *given: full().paths)
    return asked


@pytest.mark.slow
def test_a_comparison_prints_its_tables_and_ends_with_advice(capsys):
    assert cli.main([*TINY, "--mechanism", "linear", "--mechanism", "window:size=5", "--no-layers"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0].startswith("normal numbers (independent")
    assert [line for line in lines if line.startswith("Reading q, k and v")] == [
        *(f"Reading q, k and v: {length} tokens" for length in (16, 32, 64)),
        "Reading q, k and v: growth",
        "Reading q, k and v: where they become faster",
    ]
    for name in ("exact", "linear", "window:size=5"):
        assert sum(line.split()[:1] == [name] for line in lines) == 6
    assert sum(line.startswith("  window:size=5, 4 layers") for line in lines) == 1
    assert lines[-1].startswith(("Take", "Stay", "No advice"))
    assert "\x1b" not in shown.out


@pytest.mark.slow
def test_layers_stand_beside_attention(capsys):
    assert cli.main([*TINY, "--lengths", "16", "--mechanism", "GRU", "--json", "-"]) == 0
    made = VariantComparison.from_json(capsys.readouterr().out)
    assert [line.name for line in made.lines] == ["exact", "attention", "GRU"]
    assert [path.name for path in made.paths] == ["exact", "attention", "GRU"]
    assert made.settings["command"].startswith("saccade")
    assert made.machine["threads"] == 1
    assert all(set(line.points[0].readings) == {"forward", "training", "decode"} for line in made.lines)


@pytest.mark.slow
def test_bidirectional(capsys):
    given = "--lengths 16 --bidirectional --no-layers --mechanism linformer --mechanism window --json -"
    assert cli.main([*TINY, *given.split()]) == 0
    made = VariantComparison.from_json(capsys.readouterr().out)
    assert made.data["causal"] is False
    exact, window, linformer = sorted(made.lines, key=lambda line: ("exact", "window", "linformer").index(line.name))
    assert "causal" in window.refused
    assert linformer.points[0].error is not None
    assert "direction of time" in exact.points[0].no_decode


@pytest.mark.slow
def test_the_embedded_model_is_the_default(no_work, capsys):
    assert cli.main(["compare", "--threads", "1"]) == 0
    (who, data, lengths, settings) = no_work[0]
    assert data.source.startswith("the embedded model, layer 2 of 4, reading 256 tokens")
    assert lengths == [256, 1024, 4096, 8192]
    assert {"exact", "linear", "LSTM", "connected"} < {one.name for one in who}
    assert (settings.threads, settings.budget) == (1, Budget(1.0, 3, 100))
    assert cli.main(["compare", "--quick", "--layer", "0"]) == 0
    (_, data, lengths, settings) = no_work[1]
    assert ", layer 0 of 4, " in data.source
    assert lengths == [256, 1024, 2048]
    assert settings.budget == Budget(0.1, 2, 100)


def test_a_file_of_tensors(no_work, tmp_path):
    path = tmp_path / "it.pt"
    torch.save({name: torch.randn(2, 3, 5, 7) for name in ("query", "key", "value")}, path)
    assert (
        cli.main(["compare", "--tensors", str(path), "--lengths", "4,2k,4", "--most-memory", "0.5", "--seed", "9"]) == 0
    )
    (_, data, lengths, settings) = no_work[0]
    assert data.source == str(path)
    assert lengths == [4, 2048]
    assert (settings.limits.bytes, settings.seed) == (2**29, 9)


@pytest.mark.slow
def test_files_are_written_and_shown_again(no_work, tmp_path, capsys):
    files = {kind: tmp_path / f"it.{kind}" for kind in ("json", "md", "svg")}
    given = ["--json", str(files["json"]), "--markdown", str(files["md"]), "--plot", str(files["svg"])]
    assert cli.main([*TINY, *given]) == 0
    first = capsys.readouterr().out
    made = VariantComparison.from_json(files["json"].read_text())
    assert first.splitlines() == text(made)
    assert files["md"].read_text().startswith("# Which attention to choose")
    drawn = files["svg"].read_text()
    assert drawn.startswith("<?xml")
    assert cli.main(["compare", "--read", str(files["json"]), "--plot", str(files["svg"])]) == 0
    assert capsys.readouterr().out == first
    assert files["svg"].read_text() == drawn
    assert len(no_work) == 1


@pytest.mark.slow
def test_ctrl_c_shows_and_writes_what_there_is(monkeypatch, tmp_path, capsys):
    at, count = work._points_at, iter(range(9))

    def second_is_stopped(*given):
        if next(count):
            raise KeyboardInterrupt
        return at(*given)

    monkeypatch.setattr(work, "_points_at", second_is_stopped)
    file = tmp_path / "it.json"
    assert cli.main([*TINY, "--mechanism", "exact", "--no-layers", "--json", str(file)]) == 130
    shown = capsys.readouterr().out
    assert "Reading q, k and v: 16 tokens" in shown
    assert "32 tokens" not in shown
    assert VariantComparison.from_json(file.read_text()).lengths == [16]


def test_a_wrong_result_is_exit_status_1(no_work, monkeypatch, tmp_path, capsys):
    from dataclasses import replace

    made = full()
    made.lines[1] = replace(made.lines[1], points=(replace(made.lines[1].points[1], note="WRONG: it is off"),))
    file = tmp_path / "it.json"
    file.write_text(made.as_json())
    assert cli.main(["compare", "--read", str(file)]) == 1
    assert "some at 1k: WRONG: it is off." in capsys.readouterr().out


def test_abilities_are_listed(capsys):
    assert cli.main(["compare", "--list"]) == 0
    assert "| [linformer](#linformer) |" in capsys.readouterr().out


def test_tasks_are_another_command(monkeypatch):
    asked = []
    monkeypatch.setattr("saccade.cli._parts._compare_tasks.compare_tasks", lambda *given: asked.append(given))
    assert cli.main(["compare", "--task", "copy", "--quick"]) == 0
    tasks, chosen, measuring, output = asked[0]
    assert tasks.task == ["copy"]
    assert measuring.quick
    assert (chosen.mechanism, output.as_json) == (None, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--lengths many", "lengths: expected numbers of tokens as 1000 or 4k, got 'many'"),
        ("--lengths 1", "lengths: must be at least 2, got 1"),
        ("--lengths 16,", "lengths: an entry is empty in '16,'"),
        ("--mechanism beads", "mechanism: expected one of exact, window"),
        ("--mechanism window:size=0", "size"),
        ("--mechanism linear:beads=1", "mechanism: linear takes"),
        ("--random 1,2", "random: expected batch, heads and width as 1,8,64; got '1,2'"),
        ("--model .", "--random and --model: data comes from one of --random, --tensors and a model"),
        ("--tensors .", "--random and --tensors: data comes from one of"),
        ("--layer 1", "--layer selects a layer of a model; this data has none"),
        ("--plot it.pdf", "plot: expected a file that ends in .png or .svg, got it.pdf"),
        ("--json nowhere/it.json", "cannot write nowhere/it.json"),
        ("--rounds 0", "rounds: must be at least 1, got 0"),
        ("--threads 0", "threads must be at least 1, got 0"),
        ("--most-memory 0", "most-memory: must be positive, got 0.0"),
        ("--longest-call -1", "longest-call: must be positive, got -1.0"),
        ("--tolerance 0", "tolerance: must be positive, got 0.0"),
        ("--read nowhere.json", "--read nowhere.json: no such file; expected a file that --json"),
    ],
)
def test_what_the_user_can_mend_is_one_line(given, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TINY, *given.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--tensors nowhere.pt", "nowhere.pt: no such file"),
        ("--model nowhere", "nowhere: no such model folder"),
        ("--text nowhere.txt", "--text nowhere.txt: no such file; expected a text file"),
        ("--layer 7", "layer: the model has layers 0 to 3, got 7"),
    ],
)
def test_data_that_is_not_there(given, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", "--lengths", "16", *given.split()]) == 2
    assert words in capsys.readouterr().err


def test_another_json_is_refused(tmp_path, capsys):
    file = tmp_path / "it.json"
    file.write_text(json.dumps({"groups": []}))
    assert cli.main(["compare", "--read", str(file)]) == 2
    assert f"{file}: not a comparison of mechanisms" in capsys.readouterr().err
