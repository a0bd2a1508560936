"""One name for each thing: settings are called as their options are, and no module as a function."""

from __future__ import annotations

import dataclasses
import pkgutil

import pytest
import typer.main

from saccade import cli, training
from saccade.cli import _app
from saccade.training import EvaluationSettings, Execution, LanguageRun, LanguageSettings

SMALL = "--layers 1 --heads 2 --width 12 --context 23 --batch 3 --steps 2 --vocabulary 283 --precision no".split()


@pytest.fixture
def options():
    commands = typer.main.get_command(_app.app).commands["train"].commands["lm"]
    return {parameter.opts[0].removeprefix("--") for parameter in commands.params}


def test_every_setting_has_the_name_of_its_option(options):
    names = {
        field.name for kind in (LanguageSettings, Execution, EvaluationSettings) for field in dataclasses.fields(kind)
    }
    names -= {"execution", "looks", "evaluate_windows"}  # groups, and what the command leaves alone
    assert {name.replace("_", "-") for name in names} <= options
    files = {"text", "settings", "shape", "initial"}  # `--from`, which Python has taken
    run = {field.name for field in dataclasses.fields(LanguageRun)} - files
    assert {name.replace("_", "-") for name in run} <= options


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("rate", "0", "rate: must be finite and positive, got 0.0"),
        ("decay", "-1", "decay: must be finite and not negative, got -1.0"),
        ("every", "0", "every: must be at least 1, got 0"),
        ("warmup", "-1", "warmup: steps cannot be negative, got -1"),
        ("clip", "nan", "clip: must be finite and positive, got nan"),
        ("beta2", "1", "beta2: must be in [0, 1), got 1.0"),
        ("batch", "0", "batch: must be at least 1, got 0"),
        ("repeats", "2", "repeats: is a share in [0, 1], got 2.0"),
        ("accumulate", "0", "accumulate: must be at least 1, got 0"),
    ],
)
def test_errors_name_the_option(story, tmp_path, capsys, option, value, message):
    command = ["train", "lm", str(story), "--out", str(tmp_path / "out"), *SMALL]
    assert cli.main([*command, f"--{option}", value]) == 2
    assert capsys.readouterr().err == f"saccade: error: --{message}\n"


def test_resuming_names_the_option(story, tmp_path, capsys):
    command = ["train", "lm", str(story), "--out", str(tmp_path / "out"), *SMALL]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main([*command, "--resume", "--rate", "0.003", "--decay", "0.2"]) == 2
    told = "rate 0.003 (asked for) / 0.002 (in the checkpoint); decay 0.2 (asked for) / 0.1 (in the checkpoint)\n"
    assert capsys.readouterr().err.endswith(f"is of another run: {told}")


def test_no_module_has_the_name_of_a_function():
    modules = {module.name for module in pkgutil.iter_modules(training.__path__)}
    assert "rising_rates" in modules
    assert not modules & set(training.__all__)
