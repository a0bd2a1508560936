"""Two processes train what one trains, micro-batches what an undivided step trains, and errors reach everybody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import saccade
from saccade import cli
from saccade.models import load
from saccade.training import Execution, Settings, evaluate, gradient_norms
from saccade.training.norms import weight_norms
from saccade.training.processes import accelerator_for, own_parts
from training.two_processes import run as run_here
from training.two_shards import WINDOWS, make as make_whole, step as take_step

HERE = Path(__file__).parent


def launch(
    *arguments: str, check: bool = True, more: dict[str, str] | None = None, processes: int = 2
) -> subprocess.CompletedProcess[str]:
    """CPU processes on a port that is free."""
    done = subprocess.run(**launched(*arguments, more=more, processes=processes), capture_output=True)
    assert not check or done.returncode == 0, done.stderr
    return done


def launched(*arguments: str, more: dict[str, str] | None = None, processes: int = 2) -> dict[str, object]:
    """What subprocess needs to start them."""
    source = str(Path(saccade.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(more or {})}
    return {"args": [*command, *arguments], "env": environment, "text": True}


def distance(made, reference) -> float:
    """Root mean square difference of all weights."""
    differences = [(made["weights"][n].double() - w).flatten() for n, w in reference["weights"].items()]
    return torch.cat(differences).square().mean().sqrt().item()


@pytest.fixture
def exact():
    return run_here(torch.float64, 1)


def check_same(made, exact, plain):
    """As near to training in float64 as an undivided step in float32: twice its distance at most."""
    assert distance(plain, exact) > 0
    assert distance(made, exact) <= 2 * distance(plain, exact)
    for name in ("curve", "losses"):
        came, expected = (torch.tensor(values[name], dtype=torch.float64) for values in (made, exact))
        error = (torch.tensor(plain[name], dtype=torch.float64) - expected).abs().max()
        assert (came - expected).abs().max() <= 2 * error + 2 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert made["gradients"] == pytest.approx(exact["gradients"], rel=1e-4)


@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_micro_batches_are_the_undivided_step(accumulate, exact):
    check_same(run_here(torch.float32, accumulate), exact, run_here(torch.float32, 1))
    # In float64 what is left is float64's rounding.
    assert distance(run_here(torch.float64, accumulate), exact) < 1e-12


@pytest.mark.slow
def test_the_threads_of_the_group_end_before_the_interpreter():
    """One that frees a tensor later aborts the process, which is rare, and more likely on a busy machine."""
    done = launch(str(HERE / "two_processes_end.py"))
    assert json.loads(done.stdout) == {"while it runs": True, "at its end": False}


@pytest.mark.slow
def test_two_processes_are_one(tmp_path, exact):
    plain = run_here(torch.float32, 1)
    for accumulate in (1, 2):
        launch(str(HERE / "two_processes.py"), str(tmp_path / "made"), "float32", str(accumulate))
        made = torch.load(tmp_path / "made", weights_only=True)
        assert made["processes"] == 2
        check_same(made, exact, plain)
    launch(str(HERE / "two_processes.py"), str(tmp_path / "made"), "float64", "1")
    assert distance(torch.load(tmp_path / "made", weights_only=True), exact) < 1e-12


SMALL = """--layers 1 --heads 2 --width 12 --hidden 16 --context 23 --vocabulary 283 --dropout 0.1 --batch 5 --steps 6
--every 2 --warmup 2 --precision no""".split()


@pytest.mark.slow
def test_the_command_in_two_processes(story, tmp_path):
    command = ["-m", "saccade", "train", "lm", str(story), "--out", str(tmp_path / "out"), *SMALL]
    done = launch(*command)
    assert done.stdout.count("model written") == 1
    assert done.stdout.count("best weights") == 1
    load(tmp_path / "out")
    curve = [json.loads(line)["step"] for line in (tmp_path / "out" / "curve.jsonl").read_text().splitlines()]
    assert curve == [2, 4, 6]
    again = launch(*command, check=False)
    assert again.returncode != 0
    assert again.stderr.count("saccade: error: ") == 1
    assert "is not empty" in again.stderr
    names = ("model.safetensors", "last.safetensors", "heads.json")
    expected = {name: (tmp_path / "out" / name).read_bytes() for name in names}
    max((tmp_path / "out" / "checkpoints").iterdir()).unlink()
    resumed = launch(*command, "--resume")
    assert resumed.stdout.count("model written") == 1
    assert resumed.stdout.count("from 000000004.checkpoint") == 1
    assert {name: (tmp_path / "out" / name).read_bytes() for name in names} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "many"], "'--steps'"),
        (["--rate", "0"], "rate: must be finite and positive, got 0.0"),
        (["--batch", "1"], "batch: 1 windows cannot be split among 2 processes"),
        (["--precision", "fp16"], "precision: 'fp16' needs a GPU"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_one_of_two_processes_tells_an_error(story, tmp_path, options, message):
    command = ["-m", "saccade", "train", "lm", str(story), "--out", str(tmp_path / "out"), *SMALL]
    environment = {"ACCELERATE_USE_CPU": "true"}
    done = launch(*command, *options, check=False, more=environment)
    assert done.returncode != 0
    assert done.stderr.count("saccade: error: ") == 1
    assert message in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_errors_that_all_processes_find_are_told_by_the_first(story, capsys, monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr("saccade.cli._run._PATIENCE", 0.0)
    assert cli.main(["train", "lm", str(story), "--rate", "0"]) == 2
    assert capsys.readouterr().err.count("saccade: error: --rate: ") == (rank == "0")


def test_rows_are_shared_out_once():
    class Accelerator:
        device, num_processes = torch.device("cpu"), 3

        def __init__(self, index):
            self.process_index = index

    windows = torch.arange(17)[:, None].expand(17, 5)
    parts = [own_parts(Accelerator(index), torch.Tensor.tensor_split, windows, 2) for index in range(3)]
    assert [part.shape[0] for own in parts for part in own] == [3, 3, 3, 3, 3, 2]
    assert torch.equal(torch.cat([part for own in parts for part in own]), windows)


def test_too_few_rows():
    with pytest.raises(
        ValueError, match="batch: 3 windows cannot be split among 1 processes with 5 micro-batches each"
    ):
        accelerator_for(Settings(steps=1, batch=3, execution=Execution("no", accumulate=5)))


def test_half_precision_needs_a_gpu():
    with pytest.raises(ValueError, match="precision: 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'"):
        accelerator_for(Settings(steps=1, execution=Execution("fp16")))


def tensors(value) -> list[torch.Tensor]:
    """All tensors in nested dictionaries, in order."""
    if isinstance(value, dict):
        return [tensor for name in sorted(value) for tensor in tensors(value[name])]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.slow
def test_sharded_weights_are_kept_and_put_back(tmp_path):
    launch(str(HERE / "two_shards.py"), str(tmp_path / "made"))
    made = torch.load(tmp_path / "made", weights_only=True)
    for part in ("model", "optimizer"):
        assert tensors(made["first"][part])
        for one, other in (("first", "again"), ("second", "resumed")):
            pairs = list(zip(tensors(made[one][part]), tensors(made[other][part]), strict=True))
            assert all(torch.equal(a, b) for a, b in pairs)
    model = make_whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    take_step(model, optimizer)
    take_step(model, optimizer)
    for name, value in model.state_dict().items():
        # Two steps of AdamW, each at most about the rate: other orders of summing move them by far less.
        torch.testing.assert_close(made["weights"][name], value, atol=1e-5, rtol=0)
    assert made["gradients"] == pytest.approx(gradient_norms(model), rel=1e-4)
    assert made["norms"] == pytest.approx(weight_norms(model), rel=1e-5)
    assert made["loss"] == pytest.approx(evaluate(model, WINDOWS), rel=1e-5)
