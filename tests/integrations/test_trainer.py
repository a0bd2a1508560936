"""The training monitor in a real transformers Trainer."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from saccade.integrations.trainer import AttentionCallback  # noqa: E402

L, V = 23, 29

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def gpt2(dead_head=False):
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=L, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.normal_(std=12**-0.5)  # heads that are not all even, as those of 0.02 would be
        if dead_head:
            model.transformer.h[1].attn.c_attn.weight[:, :6] = 0.0
    return model


def data(count):
    tokens = torch.randint(0, V, (count, L), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, tmp_path, *callbacks, kind=transformers.Trainer, evaluated=None, **options):
    small = {"max_steps": 5, "per_device_train_batch_size": 3, "learning_rate": 1e-3, "use_cpu": True}
    quiet = {"disable_tqdm": True, "report_to": [], "save_strategy": "no"}
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), **{**small, **quiet, **options})
    return kind(model=model, args=args, train_dataset=data(60), eval_dataset=evaluated, callbacks=list(callbacks))


class Kept:
    def __init__(self):
        self.steps = {}

    def scalars(self, values, step):
        self.steps[step] = dict(values)

    def histograms(self, values, step): ...

    def text(self, tag, text, step): ...


def hooks(model):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    read.Reload()
    return read


@pytest.mark.slow
def test_every_nth_optimizer_step_is_written_and_nothing_is_left_behind(tmp_path):
    kept, model = Kept(), gpt2()
    trainer(model, tmp_path, AttentionCallback(kept, every=2)).train()
    assert list(kept.steps) == [1, 2, 4]
    for values in kept.steps.values():
        assert values["attention/transformer.h.01.attn/entropy"] > 0
        assert values["attention/transformer.h.01.attn/gradient_key"] > 0
    assert hooks(model) == 0


@pytest.mark.slow
def test_training_is_the_same_to_the_bit(tmp_path):
    watched, plain = gpt2(), gpt2()
    trainer(watched, tmp_path, AttentionCallback(Kept(), every=1)).train()
    trainer(plain, tmp_path).train()
    for ours, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_step_of_several_batches_is_one(tmp_path):
    whole, parts = Kept(), Kept()
    trainer(gpt2(), tmp_path, AttentionCallback(whole, every=1), max_steps=1, per_device_train_batch_size=6).train()
    trainer(
        gpt2(),
        tmp_path,
        AttentionCallback(parts, every=1),
        max_steps=1,
        gradient_accumulation_steps=2,
    ).train()
    assert list(parts.steps) == [1]
    assert parts.steps[1] == pytest.approx(whole.steps[1], rel=1e-4)


@pytest.mark.slow
def test_evaluation_is_not_watched(tmp_path):
    model, seen = gpt2(), []

    class Looks(transformers.TrainerCallback):
        def on_prediction_step(self, args, state, control, **others):
            seen.append(hooks(model))

    fit = trainer(
        model,
        tmp_path,
        AttentionCallback(Kept(), every=1),
        Looks(),
        evaluated=data(3),
        eval_strategy="steps",
        eval_steps=1,
    )
    fit.train()
    assert seen
    assert set(seen) == {0}


@pytest.mark.slow
def test_tensorboard_is_the_default(tmp_path):
    trainer(gpt2(dead_head=True), tmp_path, AttentionCallback(every=2), max_steps=2).train()
    read = events(tmp_path / "out" / "runs" / "attention")
    tag = "attention/transformer.h.01.attn"
    assert [event.step for event in read.Scalars(f"{tag}/max_logit")] == [1, 2]
    assert [event.step for event in read.Histograms(f"{tag}/value")] == [1, 2]
    (event,) = read.Tensors("attention/alarms/text_summary")
    assert b"uniform head in layer 1 (transformer.h.1.attn), head 0, step 1" in event.tensor_proto.string_val[0]


@pytest.mark.slow
def test_a_resumed_run_shows_each_step_once(tmp_path):
    trainer(gpt2(), tmp_path, AttentionCallback(every=1), max_steps=3, save_strategy="steps", save_steps=2).train()
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    assert "AttentionCallback" not in str(state)
    resumed = trainer(gpt2(), tmp_path, AttentionCallback(every=1), max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    read = events(tmp_path / "out" / "runs" / "attention")
    assert [event.step for event in read.Scalars("attention/transformer.h.00.attn/entropy")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_the_trainer_reports_to_gets_the_numbers_and_its_own_log_is_not_lost(tmp_path):
    logs = []

    class Reports(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **others):
            told.append((state.global_step, dict(logs)))

    told = logs
    callback = AttentionCallback(every=2)
    fit = trainer(gpt2(dead_head=True), tmp_path, Reports(), callback, max_steps=4, logging_steps=1)
    callback.report_to(fit)
    fit.train()
    ours = [(step, values) for step, values in logs if "attention/alarms_open" in values]
    assert [step for step, _ in ours] == [1, 2, 4]
    assert [step for step, values in logs if "loss" in values] == [1, 2, 3, 4]
    assert any("uniform head" in values.get("attention/alarms", "") for _, values in logs)


@pytest.mark.slow
def test_an_alarm_may_stop_the_training(tmp_path):
    callback = AttentionCallback(Kept(), every=1, stop_on=["uniform head"])
    fit = trainer(gpt2(dead_head=True), tmp_path, callback)
    fit.train()
    assert fit.state.global_step == 1
    assert [(alarm.kind, alarm.head, alarm.step) for alarm in callback.alarms] == [("uniform head", 0, 1)]


class Failing(transformers.Trainer):
    fails = True

    def compute_loss(self, *args, **how):
        if self.fails:
            raise ZeroDivisionError("planted")
        return super().compute_loss(*args, **how)


@pytest.mark.slow
def test_after_an_exception_close_or_the_next_training_ends_the_watch(tmp_path):
    model = gpt2()
    callback = AttentionCallback(Kept(), every=1)
    fit = trainer(model, tmp_path, callback, kind=Failing, max_steps=2)
    with pytest.raises(ZeroDivisionError):
        fit.train()
    callback.close()
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError):
        fit.train()
    Failing.fails = False
    fit.train()
    Failing.fails = True
    assert hooks(model) == 0


@pytest.mark.slow
def test_other_processes_do_not_watch(tmp_path):
    callback = AttentionCallback(Kept(), every=1)
    model = gpt2()
    fit = trainer(model, tmp_path, callback, max_steps=1)
    fit.is_world_process_zero = lambda: False
    fit.train()
    assert callback.monitor is None
    assert callback.alarms == []


def test_options_are_checked_before_training():
    with pytest.raises(ValueError, match="every: must be a whole number"):
        AttentionCallback(every=0)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "saccade.integrations.trainer")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'transformers: is not installed \(pip install "transformers>=5.0"'):
        importlib.import_module("saccade.integrations.trainer")
