"""Processes that share windows train what one process trains, and a killed run is resumed by another number of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from saccade import cli
from saccade.models import load
from saccade.operator.variants import parse
from saccade.training import Execution, Objective, train_language_model
from saccade.training.run_folder.checkpoint_files import checkpoints, read_checkpoint
from training.test_processes import distance, launch, launched
from training.two_processes import run as run_here

HERE = Path(__file__).parent
SIZES = """--layers 2 --heads 2 --width 12 --hidden 16 --context 23 --vocabulary 283 --dropout 0 --batch 5 --warmup 2
--precision no --no-tensorboard --steps 50 --every 10 --checkpoint-every 2""".split()


@pytest.mark.slow
def test_four_processes_two_for_each_window_are_one(tmp_path):
    """In float64, where only the order of sums is left: rows, windows, losses and gradients are all counted once."""
    exact = run_here(torch.float64, 1)
    launch(str(HERE / "two_processes.py"), str(tmp_path / "made"), "float64", "1", "2", processes=4)
    made = torch.load(tmp_path / "made", weights_only=True)
    assert made["processes"] == 4 and distance(made, exact) < 1e-12
    for name in ("curve", "losses"):  # sums of losses are in float32
        assert torch.tensor(made[name]).allclose(torch.tensor(exact[name]), rtol=1e-6)


def train(story, out, *more):
    assert cli.main(["train", "lm", str(story), "--out", str(out), *SIZES, *more]) == 0
    return final(out)


def final(out):
    load(out)
    weights = read_checkpoint(checkpoints(out / "checkpoints")[0])["loop"]["model"]
    steps = [json.loads(line)["step"] for line in (out / "curve.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30, 40, 50]
    return {"weights": weights}


def process_of(rank, out):
    """The process of the run into `out` that has this rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, has = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(out).encode() in words and f"RANK={rank}".encode() in has:
            return int(folder.name)
    raise AssertionError(f"no process has rank {rank}")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize(("fault", "after"), [("killed", 2), ("terminated", 1)])
def test_a_run_that_ends_early_goes_on_with_another_number_of_processes(story, tmp_path, fault, after):
    """Its weights are as near to those of one process as micro-batches are, which differ by rounding alone."""
    out = tmp_path / "out"
    command = ["-m", "saccade", "train", "lm", str(story), "--out", str(out), *SIZES]
    begun = subprocess.Popen(
        **launched(*command, "--context-parallel", "2", processes=4), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not (out / "checkpoints" / "000000004.checkpoint").exists():
        assert begun.poll() is None, begun.communicate()
        time.sleep(0.02)
    if fault == "killed":
        os.kill(process_of(3, out), signal.SIGKILL)
    else:
        os.kill(process_of(1, out), signal.SIGTERM)
    printed, errors = begun.communicate(timeout=120)
    assert begun.returncode != 0 and "model written" not in printed
    if fault == "killed":
        assert errors.count("saccade: error: ") == 1 and "rank 3 ended without reporting an error" in errors
        assert f"{out} keeps its checkpoints; --resume goes on" in errors
    else:
        assert errors.count(f"saccade: stopped; {out} keeps the best weights and the last") == 1
        last = int(max((out / "checkpoints").iterdir()).stem)
        assert last % 2 or last < 50  # of the step after which the signal came
    if after == 2:
        launch(*command, "--resume", "--context-parallel", "2")
        made = final(out)
    else:
        made = train(story, out, "--resume")
    whole, parts = train(story, tmp_path / "whole"), train(story, tmp_path / "parts", "--accumulate", "2")
    assert 0 < distance(made, whole) < 10 * distance(parts, whole)


def test_without_torchrun_the_message_has_the_command(story, tmp_path, capsys):
    out = tmp_path / "out"
    assert cli.main(["train", "lm", str(story), "--out", str(out), *SIZES, "--context-parallel", "2"]) == 2
    expected = "--context-parallel: needs a multiple of 2 processes, got 1; start them with `torchrun"
    assert expected in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": {"mechanism": parse("linear", 11)}}, "context_parallel: shares softmax attention, not"),
        ({"looks": {"watch": 2}}, "watch: heads are not watched where windows are shared"),
    ],
)
def test_what_cannot_be_shared_is_an_error_before_anything_is_written(make_run, monkeypatch, change, message):
    monkeypatch.setattr("saccade.training.processes._check_sequences", lambda execution, processes: None)
    run = make_run(execution={"context_parallel": 2}, **change)
    with pytest.raises(ValueError, match=message):
        train_language_model(run)
    assert not run.out.exists()


def test_a_compiled_model_cannot_be_shared():
    from saccade.training.processes import _check_sequences

    with pytest.raises(ValueError, match="context_parallel: a compiled model cannot share sequences"):
        _check_sequences(Execution("no", compile=True, context_parallel=2), 2)


def test_other_tasks_say_that_they_share_no_sequences():
    class Line(Objective):
        batch = split = weight = tokens = loss = evaluate = None

    with pytest.raises(ValueError, match="context_parallel: Line cannot share sequences, language models can"):
        Line().share_sequences(2)
