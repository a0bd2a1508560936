"""Stacks that cannot be called, or not in every way: one clear message for each, and the other probes go on."""

from __future__ import annotations

import json

import pytest
from stacks.dense import Dense, packed

import saccade
from saccade.cli import main


class Prints(Dense):
    def forward(self, input_ids, **named):
        print("step")
        return super().forward(input_ids, **named)


class RaisesInTraining(Dense):
    def forward(self, input_ids, **named):
        if self.training:
            raise RuntimeError("no path for training")
        return super().forward(input_ids, **named)


def status(report):
    return {outcome.name: outcome for outcome in report.outcomes}


@pytest.mark.parametrize(
    ("given", "probe", "words"),
    [
        ({"model": Dense().to("meta")}, "batch", "parameters are on the meta device"),
        ({"model": Dense(), "batch": lambda documents: None}, "batch", "batch: .*expected token ids.*got NoneType"),
        ({"model": Dense(), "pack": lambda documents: {"x": 1}}, "packing", "pack: .*expected token ids"),
        ({"model": Dense(), "pack": lambda documents: packed(documents[:1])}, "packing", "do not hold the document"),
        ({"model": Dense(), "decode": lambda tokens, state: None}, "cache", "decode: expected .*got NoneType"),
        ({"model": lambda input_ids: input_ids.float()}, "batch", "the model's output: expected .*width"),
    ],
)
def test_what_cannot_be_tested_is_said_once_and_never_passed(given, probe, words):
    report = saccade.verify_stack(**given)
    assert not report.errors, str(report)
    outcome = status(report)[probe]
    assert (outcome.status, outcome.measured) == ("n/a", False)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(outcome.reason)
    passed = {name for name, one in status(report).items() if one.status == "passed"}
    assert probe == "batch" or {"determinism", "causality", "batch"} <= passed


def test_one_path_that_raises_is_named_and_others_are_tested():
    report = saccade.verify_stack(RaisesInTraining())
    assert {error.probe for error in report.errors} <= {"causality", "training"}
    assert all("no path for training" in error.message for error in report.errors)
    assert status(report)["batch"].status == "passed"


def test_a_stack_that_prints_is_a_note(capsys):
    report = saccade.verify_stack(Prints())
    assert report.ok
    assert not capsys.readouterr().out
    [note] = report.findings
    assert note.severity == "note" and "It prints during a call: step" in note.message


STACKS = """
import torch, saccade
from stacks.dense import Dense, packed
from stacks.test_bad_input import Prints

def right():
    return {"model": Prints(), "pack": packed}

def wrong():
    return Prints(), None, lambda documents: {**packed(documents), "attention_mask": None}

def unknown():
    return {"model": Dense(), "packs": packed}

def nothing(): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        pytest.param("right", 0, "", marks=pytest.mark.slow),
        ("wrong", 1, "Document 1 attends to document 0"),
        pytest.param("unknown", 2, "unknown packs", marks=pytest.mark.slow),
        pytest.param("nothing", 2, "no model", marks=pytest.mark.slow),
    ],
)
def test_the_command_end_to_end(tmp_path, capsys, name, code, words):
    """Its JSON is whole though the stack prints."""
    (tmp_path / "stack.py").write_text(STACKS)
    assert main(["verify", f"{tmp_path / 'stack.py'}:{name}", "--json"]) == code
    out, error = capsys.readouterr()
    if code == 2:
        assert words in " ".join(error.split())
        return
    numbers = json.loads(out)
    assert numbers["ok"] is (code == 0)
    assert all(words in finding["message"] for finding in numbers["findings"] if finding["severity"] == "error")
