"""Compiled and checkpointed runs learn the same, and a run that goes wrong says where."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import saccade
from saccade import cli
from saccade.models import DecoderLM, load
from saccade.training import train_language_model
from saccade.training.run_folder.checkpoint_files import read_checkpoint

SMALL = "--layers 2 --heads 2 --width 12 --hidden 16 --context 23 --batch 4 --steps 5 --every 2 --warmup 2".split()
SMALL += "--vocabulary 283 --precision no --dropout 0".split()


def final_weights(out):
    return read_checkpoint(max((out / "checkpoints").iterdir()))["loop"]["model"]


@pytest.mark.slow
def test_checkpointing_gives_the_same_bits(make_run, tmp_path, monkeypatch):
    shape = {"dropout": 0.3, "layers": 2}
    train_language_model(make_run(shape=shape, out=tmp_path / "plain"))
    # Only what the blocks keep for the backward pass differs: the same dropout is drawn again.
    seen = []
    forward = DecoderLM.forward
    monkeypatch.setattr(
        DecoderLM, "forward", lambda self, *a, **k: seen.append(self.decoder.checkpointing) or forward(self, *a, **k)
    )
    train_language_model(make_run(shape=shape, execution={"checkpointing": True}, out=tmp_path / "checkpointed"))
    assert any(seen)
    for name, tensor in final_weights(tmp_path / "plain").items():
        assert torch.equal(tensor, final_weights(tmp_path / "checkpointed")[name])


def test_compiling_without_a_compiler_is_refused(make_run, monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ValueError, match=r"compile: needs a C\+\+ compiler on a CPU, and there is none"):
        train_language_model(make_run(execution={"compile": True}))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_compiled_run_learns_the_same_and_loads_uncompiled(story, tmp_path):
    source = str(Path(saccade.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    curves = []
    for name, options in (("plain", []), ("compiled", ["--compile"])):
        command = [sys.executable, "-m", "saccade", "train", "lm", str(story), "--out", str(tmp_path / name), *SMALL]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *options], env=environment, check=True, capture_output=True)
        lines = [json.loads(line) for line in (tmp_path / name / "curve.jsonl").read_text().splitlines()]
        curves.append([line[loss] for line in lines for loss in ("training_loss", "validation_loss")])
    # Both are rounded to 5 digits; fused kernels round differently in each of a few operations per layer and step.
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)
    lm = load(tmp_path / "compiled")
    assert set(lm.model.state_dict()) == set(final_weights(tmp_path / "compiled"))
    assert not any("_orig_mod" in name for name in final_weights(tmp_path / "compiled"))


@pytest.mark.slow
def test_a_run_that_diverges_says_where_and_keeps_what_there_is(story, tmp_path, capsys, monkeypatch):
    train, calls = DecoderLM.forward, []

    def forward(self, tokens, **options):
        if self.training:
            calls.append(None)
            if len(calls) == 4:
                with torch.no_grad():
                    self.decoder.blocks[1].attention.projection.weight[0, 0] = math.nan
        return train(self, tokens, **options)

    monkeypatch.setattr(DecoderLM, "forward", forward)
    out = tmp_path / "out"
    assert cli.main(["train", "lm", str(story), "--out", str(out), *SMALL, "--no-tensorboard"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "saccade: error: training: the loss became nan at step 4, first in layer 1: query; the step was not made; "
        "try a smaller learning rate\n"
    )
    report = (out / "anomaly.txt").read_text()
    assert report.startswith("first not finite: layer 1: query (4, 2, 23, 6): min ")
    assert "decoder.blocks.1.attention.projection.weight" in report
    assert max((out / "checkpoints").iterdir()).stem == "000000002"
    load(out)
    monkeypatch.undo()
    assert cli.main(["train", "lm", str(story), "--out", str(out), *SMALL, "--no-tensorboard", "--resume"]) == 0
    assert not (out / "anomaly.txt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "fp16"], "precision: 'fp16' needs a GPU"),
        (["--accumulate", "9"], "batch: 4 windows cannot be split among 1 processes with 9 micro-batches each"),
        (["--accumulate", "0"], "accumulate: must be at least 1, got 0"),
        (["--checkpoint-every", "0"], "--checkpoint-every: must be at least 1, got 0"),
        (["--patience", "0"], "patience: must be at least 1, got 0"),
        (["--improvement", "-1"], "improvement: must be finite and not negative, got -1.0"),
        (["--seed", "-1"], "seed: must be in [0, 2**63), got -1"),
        (
            ["--resume", "--overwrite"],
            "resume: continues what is in the folder, overwrite replaces it; give one of them",
        ),
    ],
)
def test_bad_options_are_one_line_and_leave_nothing(story, tmp_path, capsys, options, message):
    assert cli.main(["train", "lm", str(story), "--out", str(tmp_path / "out"), *SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("saccade: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_help_shows_options_by_theme(capsys):
    assert cli.main(["train", "lm", "--help"]) == 0
    told = capsys.readouterr().out
    headings = [
        "Arguments:",
        "Files and folders:",
        "Text and tokens:",
        "Model:",
        "Learning:",
        "Memory and speed:",
        "Evaluation and checkpoints:",
        "Options:",
    ]
    places = [told.index(f"\n{heading}\n") for heading in headings]
    assert places == sorted(places)
    assert told.index("--accumulate") > told.index("Memory and speed:")
    assert "Exit status: 0 trained" in told


@pytest.mark.slow
def test_tensorboard_is_asked_for(story, tmp_path, capsys, monkeypatch):
    command = ["train", "lm", str(story), *SMALL, "--out"]
    assert cli.main([*command, str(tmp_path / "by-default")]) == 0
    assert (tmp_path / "by-default" / "tensorboard").is_dir()
    assert cli.main([*command, str(tmp_path / "without"), "--no-tensorboard"]) == 0
    assert not (tmp_path / "without" / "tensorboard").exists()
    capsys.readouterr()
    find = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else find(name))
    assert cli.main([*command, str(tmp_path / "asked"), "--tensorboard"]) == 2
    assert 'pip install "accelerate>=1.0"' in capsys.readouterr().err
