"""`--watch`: the attention of a run's model in its log, alarms told, and training as it would have been."""

from __future__ import annotations

import dataclasses

import pytest

from saccade.models import load
from saccade.monitoring import Thresholds
from saccade.training import EvaluationSettings, Execution, Reporter, Settings, train_language_model
from training.test_killing import scalars

SHAPE = {"layers": 2, "heads": 2, "width": 12, "hidden": 16, "context": 31}


class Told(Reporter):
    def __init__(self):
        self.lines = []

    def warned(self, message):
        self.lines.append(message)


def watched(make_run, **looks):
    return make_run(5, shape=SHAPE, looks={"every": 5, "tensorboard": True, **looks})


@pytest.mark.slow
def test_every_nth_step_is_in_the_log(make_run):
    run = watched(make_run, watch=2)
    train_language_model(run)
    log = scalars(run.out / "tensorboard")
    for layer in (0, 1):
        for name in ("entropy", "max_logit", "gradient_query"):
            tag = f"attention/decoder.blocks.{layer:02d}.attention/{name}"
            assert [step for step, _ in log[tag]] == [1, 2, 4]
            assert all(value > 0 for _, value in log[tag])


@pytest.mark.slow
def test_the_log_holds_histograms_and_alarms_as_tensorboard_reads_them(make_run, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("saccade.monitoring._alarms.Thresholds", lambda: Thresholds(logit=1e-3, grown=1e-3))
    run, told = watched(make_run, watch=2), Told()
    train_language_model(run, told)
    (file,) = (run.out / "tensorboard").iterdir()
    read = EventAccumulator(str(file), size_guidance={"histograms": 0})
    read.Reload()
    found = read.Histograms("attention/decoder.blocks.01.attention/query")
    assert [event.step for event in found] == [1, 2, 4]
    assert found[0].histogram_value.num == pytest.approx(3 * 31 * 12)
    (event,) = read.Tensors("attention/alarms/text_summary")
    assert b"logit growth in layer 0 (decoder.blocks.0.attention), head 0, step 1" in event.tensor_proto.string_val[0]
    assert len([line for line in told.lines if "logit growth" in line]) == 4  # two heads of two layers, once each


@pytest.mark.slow
def test_what_is_learned_is_the_same_to_the_bit(make_run, tmp_path):
    run = watched(make_run, watch=1)
    plain = dataclasses.replace(watched(make_run), out=tmp_path / "plain")
    for each in (run, plain):
        train_language_model(each)
    ours, theirs = load(run.out).model.state_dict(), load(plain.out).model.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
def test_without_a_log_alarms_are_told_all_the_same(make_run, monkeypatch):
    monkeypatch.setattr("saccade.monitoring._alarms.Thresholds", lambda: Thresholds(logit=1e-3, grown=1e-3))
    told = Told()
    train_language_model(watched(make_run, watch=2, tensorboard=False), told)
    assert len([line for line in told.lines if "logit growth" in line]) == 4


@pytest.mark.slow
def test_a_model_whose_blocks_are_computed_again_is_watched_too(make_run):
    run = make_run(
        2, shape=SHAPE, looks={"every": 2, "tensorboard": True, "watch": 1}, execution={"checkpointing": True}
    )
    train_language_model(run)
    log = scalars(run.out / "tensorboard")
    assert [step for step, _ in log["attention/decoder.blocks.01.attention/entropy"]] == [1, 2]


def test_steps_between_looks_are_positive_and_the_model_is_not_compiled():
    with pytest.raises(ValueError, match="watch: must be at least 1, got 0"):
        EvaluationSettings(watch=0)
    with pytest.raises(ValueError, match="watch: a compiled model cannot be watched"):
        Settings(3, looks=EvaluationSettings(watch=2), execution=Execution(compile=True))
