"""The training loop: schedule, evaluation, one step by hand, and learning something."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from looped import looped
from saccade.models import DecoderLM, ModelConfig
from saccade.training import (
    Corpus,
    Diverged,
    EvaluationSettings,
    Execution,
    LanguageObjective,
    LanguageSettings,
    Monitor,
    draw_windows,
    evaluate,
    learning_rate,
    train,
    whole_windows,
)
from saccade.training.language.objective import spread
from saccade.training.language.windows import draw_copying
from saccade.training.loop import _LoopState

CONFIG = ModelConfig(31, width=12, layers=2, heads=2, hidden=16, context=11)
FLOAT32 = Execution(precision="no")
SETTINGS = LanguageSettings(
    steps=5, batch=3, rate=0.01, warmup=2, clip=0.5, execution=FLOAT32, looks=EvaluationSettings(every=2)
)
TOKENS = torch.arange(211) ** 2 % 31


class Notes(Monitor):
    def __init__(self):
        self.steps, self.looks = [], []

    def step(self, step, loss, norm, rate, tokens_per_second):
        self.steps.append((step, loss, norm, rate))

    def evaluated(self, step, training_loss, evaluation, seconds, weights):
        self.looks.append((step, training_loss, evaluation.loss))


def make(config=CONFIG) -> DecoderLM:
    torch.manual_seed(3)
    return DecoderLM(config)


def run(settings=SETTINGS, model=None, tokens=TOKENS):
    model, notes = model or make(), Notes()
    loss = train(LanguageObjective(model, Corpus(tokens, tokens[:101]), 0, settings), settings, notes)
    return model, notes, loss


def test_schedule():
    rates = [learning_rate(step, peak=2.0, steps=100, warmup=20) for step in range(101)]
    assert rates[:20] == pytest.approx([2.0 * (step + 1) / 20 for step in range(20)])
    for step in range(20, 101):
        assert rates[step] == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * (step - 20) / 80)) / 2)
    assert rates[20] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(1.1)
    assert rates[100] == pytest.approx(0.2)
    assert learning_rate(0, peak=2.0, steps=1, warmup=0) == pytest.approx(2.0)


def test_schedule_with_copying_first():
    settings = dataclasses.replace(SETTINGS, steps=50, warmup=10, copying=30)
    plain = dataclasses.replace(settings, copying=0)
    assert settings.all_steps == 80
    rates = [settings.rate_at(step) for step in range(80)]
    assert rates[:10] == [plain.rate_at(step) for step in range(10)]
    assert rates[10:41] == [settings.rate] * 31
    assert rates[40:] == [plain.rate_at(step) for step in range(10, 50)]


def test_evaluate_is_the_mean_over_all_tokens():
    model = make(dataclasses.replace(CONFIG, dropout=0.5)).train()
    windows = whole_windows(TOKENS, start=0, context=11)
    loss = evaluate(model, windows, batch=4)
    assert model.training
    model.eval()
    expected = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_spread():
    windows = torch.arange(101)[:, None]
    assert spread(windows, None) is windows
    assert spread(windows, 200) is windows
    assert spread(windows, 4).flatten().tolist() == [0, 25, 50, 75]


def test_steps_are_adamw_with_clipped_gradients():
    expected = make()
    matrices = [p for p in expected.parameters() if p.ndim > 1]
    vectors = [p for p in expected.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    norms = []
    for step in range(SETTINGS.steps):
        windows = draw_windows(TOKENS, start=0, context=11, batch=3, seed=0, step=step)
        F.cross_entropy(expected(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=0.01, steps=5, warmup=2)
        optimizer.step()
        optimizer.zero_grad()
    model, notes, _ = run()
    assert max(norms) > 0.5
    assert [norm for _, _, norm, _ in notes.steps] == pytest.approx(norms, rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected.get_parameter(name), atol=1e-5, rtol=1e-4)


def test_what_the_monitor_is_told():
    _, notes, loss = run()
    assert [step for step, *_ in notes.steps] == [1, 2, 3, 4, 5]
    assert [step for step, *_ in notes.looks] == [2, 4, 5]
    losses = [loss for _, loss, *_ in notes.steps]
    means = [training for _, training, _ in notes.looks]
    assert means == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:4]) / 2, losses[4]])
    assert loss == notes.looks[-1][2]


def test_the_same_seed_gives_the_same_weights():
    config = dataclasses.replace(CONFIG, dropout=0.2)
    first, second = run(model=make(config))[0], run(model=make(config))[0]
    other = run(dataclasses.replace(SETTINGS, seed=1), make(config))[0]
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@pytest.mark.slow
def test_learns_a_text_by_heart():
    settings = LanguageSettings(
        steps=250, batch=16, rate=0.02, warmup=10, execution=FLOAT32, looks=EvaluationSettings(every=250)
    )
    # Of period 13 and longer than the context: the next token follows from the last two.
    tokens = (torch.arange(211) % 13) * (torch.arange(211) % 13) % 11
    _, notes, loss = run(settings, make(dataclasses.replace(CONFIG, width=32)), tokens)
    assert notes.steps[0][1] > 3.0
    # The first token of a window cannot be known: ln 13 at worst in one of 11.
    assert loss < math.log(13) / 11 + 0.1


def test_copying_comes_first_and_without_dropout():
    settings = dataclasses.replace(SETTINGS, copying=3)
    model = make(dataclasses.replace(CONFIG, dropout=0.5))
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append((module.training, inputs[0].clone())))
    _, notes, _ = run(settings, model)
    assert [step for step, *_ in notes.steps] == list(range(1, 9))
    steps = [(training, tokens) for training, tokens in seen if tokens.shape[0] == 3]
    assert [training for training, _ in steps] == [False] * 3 + [True] * 5
    for step, (_, tokens) in enumerate(steps):
        if step < 3:
            expected = draw_copying(31, start=0, context=11, batch=3, seed=0, step=step)
        else:
            expected = draw_windows(TOKENS, start=0, context=11, batch=3, seed=0, step=step - 3)
        assert torch.equal(tokens, expected[:, :-1])


@pytest.mark.parametrize(("has", "chosen"), [((), "no"), (("avx512_bf16",), "bf16"), (("amx_tile",), "bf16")])
def test_precision_follows_the_processor(monkeypatch, has, chosen):
    for kind in ("avx512_bf16", "amx_tile"):
        monkeypatch.setattr(torch.cpu, f"_is_{kind}_supported", lambda kind=kind: kind in has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Execution().settled.precision == Execution(precision="auto").settled.precision == chosen
    assert Execution(precision="no").settled.precision == "no"


def test_bf16_autocast_keeps_float32_weights():
    model, notes, _ = run(dataclasses.replace(SETTINGS, execution=Execution(precision="bf16")))
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(math.isfinite(loss) for _, loss, *_ in notes.steps)


def test_a_step_that_is_not_finite_is_not_made():
    model, notes = make(), Notes()
    spoil = 3  # the step, from 0

    def poison(module, inputs, output):
        return output * math.inf if len(notes.steps) == spoil else output

    model.decoder.blocks[1].feed_forward.gate_up.register_forward_hook(poison)
    kept = []

    class Keep(Notes):
        def step(self, *values):
            notes.step(*values)
            kept.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    with pytest.raises(Diverged) as raised:
        settings = dataclasses.replace(SETTINGS, steps=9)
        train(LanguageObjective(model, Corpus(TOKENS, TOKENS[:101]), 0, settings), settings, Keep())
    assert str(raised.value) == (
        "training: the loss became nan at step 4, first in output of decoder.blocks.1.feed_forward.gate_up; "
        "the step was not made; try a smaller learning rate"
    )
    assert len(kept) == spoil
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[-1][name])
    assert raised.value.report.found.infinite > 0


def test_a_gradient_that_is_not_finite_is_named():
    model = make()
    model.decoder.blocks[0].feed_forward.down.weight.register_hook(lambda gradient: gradient * math.nan)
    expected = "gradient became non-finite at step 1, first in gradient of decoder.blocks.0.feed_forward.down.weight"
    before = model.embedding.weight.detach().clone()
    with pytest.raises(Diverged, match=expected):
        run(model=model)
    assert torch.equal(model.embedding.weight, before)


@looped(
    ("change", "message"),
    [
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"batch": 0}, "batch: must be at least 1, got 0"),
        ({"rate": 0.0}, "rate: must be finite and positive, got 0.0"),
        ({"clip": math.nan}, "clip: must be finite and positive, got nan"),
        ({"copying": -1}, "copying: steps cannot be negative, got -1"),
        ({"warmup": -1}, "warmup: steps cannot be negative, got -1"),
        ({"decay": -0.1}, "decay: must be finite and not negative, got -0.1"),
        ({"beta2": 1.0}, r"beta2: must be in \[0, 1\), got 1.0"),
        ({"seed": -1}, r"seed: must be in \[0, 2\*\*63\), got -1"),
        ({"repeats": 1.5}, r"repeats: is a share in \[0, 1\], got 1.5"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **change)


@looped(
    ("make", "change", "message"),
    [
        (
            Execution,
            {"precision": "fp8"},
            r"precision: expected 'auto', 'bf16' \(bfloat16\), 'fp16' \(float16\) or 'no' \(float32, fp32\), got 'fp8'",
        ),
        (Execution, {"accumulate": 0}, "accumulate: must be at least 1, got 0"),
        (EvaluationSettings, {"every": 0}, "every: must be at least 1, got 0"),
        (EvaluationSettings, {"evaluate_windows": 0}, "evaluate_windows: must be at least 1, got 0"),
        (EvaluationSettings, {"checkpoint_every": 0}, "checkpoint_every: must be at least 1, got 0"),
        (EvaluationSettings, {"patience": 0}, "patience: must be at least 1, got 0"),
        (EvaluationSettings, {"log_every": 0}, "log_every: must be at least 1, got 0"),
        (EvaluationSettings, {"improvement": -0.1}, "improvement: must be finite and not negative, got -0.1"),
        (EvaluationSettings, {"improvement": math.nan}, "improvement: must be finite and not negative, got nan"),
    ],
)
def test_bad_execution_and_looks(make, change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


def test_a_scaled_loss_may_overflow_twenty_times_in_a_row():
    run = object.__new__(_LoopState)
    run.accelerator, run._skipped = SimpleNamespace(scaler=object()), 0
    for _ in range(2):
        assert all(run._sound(3.0, math.inf) for _ in range(20))
        assert run._sound(3.0, 1.0)
    assert [run._sound(3.0, math.nan) for _ in range(21)] == [True] * 20 + [False]
    assert not run._sound(math.nan, 1.0)
    run.accelerator = SimpleNamespace(scaler=None)
    assert run._sound(3.0, 1.0)
    assert not run._sound(3.0, math.inf)
