"""`saccade train classify`, `test` and `predict`: the words, the streams, the exit statuses."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys

import pytest
import typer.main

from looped import looped
from saccade import cli, tasks
from saccade.cli import _app
from saccade.make._task_registry import TASK_OPTIONS
from saccade.tasks._runs._request import DECAY, SHARE
from saccade.training import EvaluationSettings, Execution, Settings
from tasks.conftest import SMALL


def command(files, out, *more):
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    return ["train", "classify", str(files / "reviews.csv"), "--out", str(out), *options, *more]


def test_settings_are_options_with_their_names_and_the_usual_decay_and_share():
    commands = typer.main.get_command(_app.app).commands["train"].commands
    names = {field.name for kind in (Settings, Execution, EvaluationSettings) for field in dataclasses.fields(kind)}
    for name in TASK_OPTIONS:
        options = {parameter.name: parameter.default for parameter in commands[name].params}
        of_language_models = {"evaluate_windows", "context_parallel"}
        assert names - {"execution", "looks"} - of_language_models <= options.keys()
        assert (options["decay"], options["share"]) == (DECAY, SHARE)


@pytest.mark.slow
def test_train_test_predict(files, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    assert cli.main(command(files, out, "--no-tensorboard")) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("classify: BERT of ") and told[0].endswith(" parameters, from random weights")
    assert told[1] == f"189 examples to train on, 22 to validate; 80 steps into {out}"
    assert "accuracy 1.0000" in told[-8] and told[-8].startswith("best weights, over all validation data: ")
    assert told[-6].startswith("accuracy 1.0000; always naming the most frequent class has ")
    assert (
        told[-5].startswith("TF-IDF with logistic regression (C = ") and ", a simple model, has accuracy " in told[-5]
    )
    following = ["test {} DATA", "predict {} INPUT", "predict {} INPUT --picture why.png"]
    assert told[-3:] == [f"  saccade {command.format(out)}" for command in following]

    picture = tmp_path / "confusion.png"
    unseen = str(files / "unseen.csv")
    assert cli.main(["test", str(out), unseen, "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out} on {unseen}: 101 examples"
    assert lines[2].split() == ["this", "model", "1.0000", "1.0000", lines[2].split()[-1]]
    assert lines[3].startswith("TF-IDF with logistic regression (C = ")
    assert lines[-1] == f"picture: {picture}" and picture.stat().st_size > 1000
    assert cli.main(["test", str(out), unseen, "--json", "--no-baseline"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["examples"], report["metrics"]["accuracy"], report["baselines"]) == (101, 1.0, {})

    assert cli.main(["predict", str(out), "such a lovely film"]) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["text"], line["label"]) == ("such a lovely film", "positive")
    monkeypatch.setattr("sys.stdin", io.StringIO("a dull plot\nfine\n"))
    assert cli.main(["predict", str(out)]) == 0
    assert [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()] == ["negative", "positive"]
    assert cli.main(["predict", str(out), unseen, "--set", "text=review"]) == 2
    advice = "name yours with --set, as --set text=COLUMN"
    assert capsys.readouterr().err == (
        f"saccade: error: {unseen}: no column 'review' in the first line, which must name them; it has 'text', "
        f"'label'; {advice}\n"
    )


@pytest.mark.slow
def test_predict_warns_of_a_model_that_was_stopped_in_its_warm_up(files, tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.main(command(files, out, "--no-tensorboard", "--steps", "3", "--warmup", "2")) == 0
    assert cli.main(["predict", str(out), "a good film"]) == 0
    told = capsys.readouterr()
    assert "warm-up" not in told.out + told.err
    given = ["--minutes", "0.0001", "--warmup", "500", "--steps", "1000"]
    assert cli.main(command(files, tmp_path / "short", "--no-tensorboard", *given)) == 0
    ended = capsys.readouterr().out
    (reason,) = re.findall(r"not a result: the run ended in its warm-up, after \d+ of 500 steps", ended)
    assert cli.main(["predict", str(tmp_path / "short"), "a good film"]) == 0
    told = capsys.readouterr()
    assert f"saccade: warning: {reason}" in told.err and json.loads(told.out.splitlines()[-1])["label"] in (
        "negative",
        "positive",
    )


def test_a_run_ends_beside_a_simple_model(files, tmp_path):
    """The line's numbers are those of the task's own baseline, trained by the test on the same split."""
    run = tasks.train("classify", files / "reviews.csv", tmp_path / "run", **{**SMALL, "steps": 2})
    line = (tmp_path / "run" / "verdict.txt").read_text().splitlines()[-1]
    training, validation = run.task.split(tasks.Classify().read(files / "reviews.csv"), SHARE, 0)
    (simple,) = run.task.baselines(run.model, training, validation, validation)
    right = [run.task.labels[int(p.argmax())] == one.label for p, one in zip(simple.outputs, validation, strict=True)]
    accuracy = sum(right) / len(right)
    assert line.startswith(
        f"{simple.name}, a simple model, has accuracy {accuracy:.4f}: as good as this model or better"
    )


def test_errors_are_one_line(learned, files, tmp_path, capsys):
    out, run, unseen = tmp_path / "out", str(learned.folder), str(files / "unseen.csv")
    cases = [
        (
            command(files, out, "--text", "review"),
            "reviews.csv: no column 'review' in the first line, which must name them; it has 'text', 'label'; name "
            "yours with --text COLUMN",
        ),
        (
            command(files, out, "--text", "review", "--label", "mood"),
            "no columns 'review' and 'mood' in the first line, which must name them; it has 'text', 'label'; name "
            "yours with --text COLUMN --label COLUMN",
        ),
        (command(files, out, "--minutes", "0"), "minutes: must be finite and positive, got 0.0"),
        (command(files, run), "is not empty; expected a new or empty folder, or --overwrite or --resume"),
        (
            ["predict", run, ""],
            "text 1: the text is empty (1 of 1 are); remove such texts, or give --set skip_empty=true",
        ),
        (command(files, out, "--last", "0"), "error: --last: "),
        (["predict", run, "nowhere.csv"], "nowhere.csv: no such file or folder"),
        (
            ["predict", str(tmp_path / "no"), "a film"],
            "no: no such folder; expected the folder of a run",
        ),
        (["test", run, unseen, "--picture", "a.pdf"], "ends in .png or .svg"),
        (["test", run, unseen, "--set", "text"], "--set text: expected NAME=VALUE"),
        (["test", run, unseen, "--set", "txt=a"], "txt: no option of classify; expected one of text, label, skip_"),
        (["test", run, unseen, "--set", "width=3"], "width: cannot differ from what"),
        (["test", run, unseen, "--set", "text=2024"], "no column '2024'"),
        (["predict", run, unseen, "--set", "longest=12.5"], "longest: expected a whole number, got '12.5'"),
        (["predict", run, unseen, "--set", "skip_empty=yes"], "skip_empty: expected true or false, got 'yes'"),
        (
            ["distill", run, "layers=1", unseen, "--out", str(out), "--set", "log-every=3"],
            "--set log_every: is no option of a task; give --log-every",
        ),
    ]
    for arguments, message in cases:
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("saccade: error: ") and error.count("\n") == 1
        assert message in error
    assert not (tmp_path / "out").exists()


def test_lines_of_standard_input_end_at_line_feeds_alone(learned, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a dull\u2028plot\x0c\nfine\r\n"))
    assert cli.main(["predict", str(learned.folder), "-"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.split("\n") if line] == [
        "a dull\u2028plot\x0c",
        "fine",
    ]


@looped(
    ("task", "option", "text", "value"),
    [
        (tasks.Classify(), "longest", "12", 12),
        (tasks.Classify(), "skip_empty", "True", True),
        (tasks.Classify(), "label", "true", "true"),
        (tasks.Tag(), "column", "2", 2),
        (tasks.Speech(), "longest", "12.5", 12.5),
        (tasks.Speech(text="said"), "text", "7", "7"),
        (tasks.Forecast(), "date", "2024", "2024"),
    ],
)
def test_texts_are_values_of_the_types_of_fields(task, option, text, value):
    found = getattr(task.changed({option: text}), option)
    assert found == value and type(found) is type(value)


def test_what_is_not_installed_is_told_before_any_work(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    assert cli.main(command(files, tmp_path / "out")) == 2
    install = 'pip install "accelerate>=1.0" "matplotlib>=3.9" "scikit-learn>=1.5"'
    expected = f"classify needs sklearn, which is not installed: {install}"
    assert capsys.readouterr().err == f"saccade: error: {expected}\n"
