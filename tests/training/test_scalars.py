"""Norms by group, and the TensorBoard log: what is in it, once per step also after a resume, and a full disk."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import signal

import pytest
import torch

from saccade.models import DecoderLM, ModelConfig
from saccade.training import Reporter, Stopped, gradient_norms, train_language_model
from saccade.training.norms import parameter_groups, weight_norms
from saccade.training.run_folder.scalars import ScalarLog
from training.test_files import files_no_larger_than
from training.test_killing import scalars


def model():
    return DecoderLM(ModelConfig(31, width=12, layers=2, heads=2, hidden=16, context=11))


def test_groups_are_the_parts_of_the_model_and_hold_each_parameter_once():
    made = model()
    groups = parameter_groups(made)
    assert set(groups) == {
        "embedding",
        "decoder.blocks.0.attention",
        "decoder.blocks.0.feed_forward",
        "decoder.blocks.1.attention",
        "decoder.blocks.1.feed_forward",
        "norms",
    }
    held = [id(parameter) for group in groups.values() for parameter in group]
    assert sorted(held) == sorted(id(parameter) for parameter in made.parameters())


def test_norms_are_those_of_the_groups_as_one_vector():
    made = model()
    for number, parameter in enumerate(made.parameters()):
        parameter.grad = torch.randn_like(parameter) if number else None
    norms = gradient_norms(made)
    for group, parameters in parameter_groups(made).items():
        flat = [p.grad.flatten() for p in parameters if p.grad is not None]
        expected = torch.cat(flat).double().norm().item() if flat else 0.0
        assert norms[group] == pytest.approx(expected, rel=1e-6)
        weights = torch.cat([p.detach().flatten() for p in parameters]).double().norm().item()
        assert weight_norms(made)[group] == pytest.approx(weights, rel=1e-6)
    assert norms["embedding"] == 0.0
    whole = torch.nn.utils.get_total_norm([p.grad for p in made.parameters() if p.grad is not None])
    assert math.hypot(*norms.values()) == pytest.approx(whole.item(), rel=1e-6)


class StopAt(Reporter):
    def __init__(self, step):
        self.at, self.told = step, []

    def step(self, step, loss, norm, rate, tokens_per_second):
        self.told.append((step, loss, norm, rate))
        if step == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def run(make_run):
    looks = {"every": 3, "checkpoint_every": 2, "log_every": 2, "tensorboard": True}
    return make_run(8, shape={"dropout": 0.1}, looks=looks)


@pytest.mark.slow
def test_the_log_holds_what_was_told(run):
    notes = StopAt(None)
    train_language_model(run, notes)
    log = scalars(run.out / "tensorboard")
    told = {step: (loss, norm, rate) for step, loss, norm, rate in notes.told if step % 2 == 0}
    for place, tag in enumerate(("loss/training", "gradient/all", "rate")):
        assert [step for step, _ in log[tag]] == [2, 4, 6, 8]
        assert [value for _, value in log[tag]] == pytest.approx(
            [numbers[place] for numbers in told.values()], rel=1e-6
        )
    assert [step for step, _ in log["loss/validation"]] == [3, 6, 8]
    groups = [tag for tag in log if tag.startswith("gradient/") and tag != "gradient/all"]
    assert len(groups) == len([tag for tag in log if tag.startswith("weights/")]) == 4
    # The groups' norms are of the gradient before it is clipped, like the whole norm.
    for number in range(4):
        assert math.hypot(*(log[tag][number][1] for tag in groups)) == pytest.approx(
            log["gradient/all"][number][1], rel=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_resumed_run_logs_each_step_once(run, tmp_path, step):
    train_language_model(dataclasses.replace(run, out=tmp_path / "whole"))
    with pytest.raises(Stopped):
        train_language_model(run, StopAt(step))
    newest = max((run.out / "checkpoints").iterdir())
    if step == 5:
        newest.unlink()  # the log is ahead of the checkpoint, as after a kill
    train_language_model(dataclasses.replace(run, resume=True))
    assert scalars(run.out / "tensorboard") == scalars(tmp_path / "whole" / "tensorboard")
    assert len(list((run.out / "tensorboard").iterdir())) == 2


@pytest.mark.slow
def test_overwriting_begins_a_new_log(run):
    train_language_model(run)
    train_language_model(dataclasses.replace(run, overwrite=True))
    assert len(list((run.out / "tensorboard").iterdir())) == 1


def test_a_log_that_cannot_be_written_ends_and_training_does_not(tmp_path):
    warnings = []
    log = ScalarLog(tmp_path / "log", 0, warnings.append)
    log.add(1, {"loss": 3.0})
    with files_no_larger_than(10):
        for step in range(2, 5):
            log.add(step, {"loss": 2.0})
            log.flush()
    log.add(5, {"loss": 1.0})
    log.close()
    assert warnings == [f"{tmp_path}/log: the TensorBoard log could not be written (File too large) and ends here"]
    (tmp_path / "file").write_text("x")
    ScalarLog(tmp_path / "file", 0, warnings.append).add(1, {"loss": 2.0})
    assert len(warnings) == 2


def test_without_tensorboard_nothing_is_touched(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else find(name))
    with pytest.raises(ValueError, match=r'tensorboard: is not installed \(pip install "accelerate>=1.0"'):
        train_language_model(run)
    assert not run.out.exists()
