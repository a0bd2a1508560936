"""The page on training with the native kernels, and what it stands for: the same losses as `chunked`, whatever is seen.

Shape legend: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

import saccade
from looped import looped
from problems import NATIVE
from saccade import Causal, Documents, Mask, Padding, Window
from saccade.models import DecoderLM, ModelConfig
from saccade.nn import AttentionConfig, BlockConfig, Decoder
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from saccade.training.language import objective
from slowly import slow_but

PATH = Path(__file__).parents[2] / "benchmarks" / "native_training.py"
spec = importlib.util.spec_from_file_location("native_training", PATH)
training = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = training  # dataclasses look their module up
spec.loader.exec_module(training)

BATCH, LENGTH, VOCABULARY, STEPS, RATE = 3, 37, 19, 20, 0.1
IGNORED = -100  # F.cross_entropy's


class Case(NamedTuple):
    """An attention module, and what its queries see: mask and padding of one step, drawn anew for each."""

    attention: AttentionConfig
    seen: Callable[[], tuple[Mask | None, Padding | None]]


def lengths():
    return torch.randint(5, LENGTH + 1, (BATCH,))


def on_the_left():
    return Padding(torch.arange(LENGTH) >= LENGTH - lengths()[:, None])


def documents():
    ids = (torch.rand(BATCH, LENGTH) < 0.1).cumsum(1)
    return Documents(ids) & Window(11, 0)


def attention(positions, **options):
    return AttentionConfig(22, 2, head_width=14, positions=positions, **options)


CASES = {
    "ALiBi, padding on the left": Case(attention(AlibiConfig(learned=True)), lambda: (None, on_the_left())),
    "T5, padding, dropout": Case(attention(T5Config(8, 23), dropout=0.2), lambda: (None, Padding(lengths()))),
    "window, grouped queries": Case(attention(RotaryConfig(), kv_heads=1, window=Window(5, 0)), lambda: (None, None)),
    "documents, a sink, dropout": Case(attention(RotaryConfig(), sink=True, dropout=0.1), lambda: (documents(), None)),
    "softcap, lengths, a gate": Case(
        attention(RotaryConfig(), softcap=5.0, gate=True, qk_norm="rms"), lambda: (Causal(), Padding(lengths()))
    ),
}


def losses_of(case, backend, dtype=torch.float32, nudge=0.0):
    """Losses of each step, (STEPS,), on sequences that repeat 7 tokens, from the same weights but for a nudge."""
    torch.manual_seed(3)
    model = DecoderLM(ModelConfig(VOCABULARY, 22, 2, 1, context=LENGTH))
    with torch.no_grad():  # further from guessing than a fresh model, so that a few steps can learn
        model.embedding.weight.mul_(22**0.25)
    model.decoder = Decoder(BlockConfig(case.attention), 2)
    model = model.to(dtype)
    with torch.no_grad():
        for weight in model.parameters() if nudge else ():
            weight.mul_(1 + nudge * torch.randn_like(weight).sign())
    optimizer = torch.optim.SGD(model.parameters(), RATE)  # AdamW would divide the size of a gradient out
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (BATCH, 7)).repeat(1, 6)[:, : LENGTH + 1]
        mask, padding = case.seen()
        targets = tokens[:, 1:]
        if padding is not None:
            targets = targets.masked_fill(~padding.dense(LENGTH, LENGTH)[:, 0, 0], IGNORED)
        with training.bound(backend, training.Clock()):
            x = model.decoder(model.embedding(tokens[:, :-1]) * 22**0.5, mask, padding=padding)
            logits = F.linear(x, model.embedding.weight).double()  # a float32 loss has a coarse last bit
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [NATIVE])
@pytest.mark.parametrize("name", slow_but(CASES, "documents, a sink, dropout"))
def test_training_gives_the_losses_of_chunked(name, backend):
    """As far from float64 as float32 is: at most twice as far as chunked from the same weights, or from weights whose
    last bits are others, which is as little as float32 can tell apart; and the last bit of a loss."""
    case = CASES[name]
    exact = losses_of(case, "chunked", torch.float64)
    assert exact[-3:].mean() < exact[:3].mean() - 0.3  # it learns
    last_bits = [losses_of(case, "chunked", nudge=nudge) for nudge in (0.0, 2.0**-23, -(2.0**-23))]
    rounding = max((losses - exact).abs().max() for losses in last_bits)
    error = (losses_of(case, backend) - exact).abs().max()
    assert error <= 2 * rounding + exact.max() * 2.0**-24
    assert 0 < rounding < 1e-5  # so that an error this large would be seen


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A text, and settings that take a moment; the arguments to run them with."""
    sizes = dict(layers=2, heads=2, width=32)
    monkeypatch.setattr(training, "SHORT", training.Setting(29, 3, steps=11, exact=5, **sizes))
    monkeypatch.setattr(training, "LONG", training.Setting(131, 1, steps=7, exact=3, **sizes))
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 60)
    return [str(text), "--out", str(tmp_path / "page.md")]


def rows(text, heading):
    """The cells of each row of the two tables of a section, by their first cell."""
    section = text.partition(f"## {heading}")[2].partition("## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {first: rest for first, *rest in cells}


@pytest.mark.slow
@pytest.mark.parametrize("backend", [NATIVE])
def test_the_page_has_losses_times_and_shares(backend, tiny, tmp_path, capsys):
    training.main(tiny)
    text = (tmp_path / "page.md").read_text()
    assert text in capsys.readouterr().out
    assert "python benchmarks/native_training.py text.txt --dtype float32 --steps 11 --long-steps 7\n" in text
    assert "2 layers, 2 heads, width 32" in text and str(tmp_path) not in text
    assert f"PyTorch {torch.__version__}, Saccade {saccade.__version__}" in text
    curves = [json.loads(line) for line in (tmp_path / "page.jsonl").read_text().splitlines()]
    settings = zip(curves, (("29, batch 3, 11 steps", 11, 5), ("131, batch 1, 7 steps", 7, 3)), strict=True)
    for curve, (heading, steps, exact) in settings:
        table, losses = rows(text, f"Context {heading}"), curve["losses"]
        assert {name: len(made) for name, made in losses.items()} == {
            "native": steps,
            "chunked": steps,
            "sdpa": steps,
            "float64": exact,
        }
        assert table["chunked"][1] == table["chunked"][3] == "1.00"
        for name in training.BACKENDS:
            step, inside, share = (float(table[name][k].split()[0]) for k in (0, 2, 4))
            assert 0 < inside < step and 0 < share < 100
            assert table[name][5] == f"{losses[name][-1]:.5f}" and float(table[name][6]) > 0
            whole, first = table[f"{name}, float64"][2:], table[f"{name}, float64"][:2]
            assert whole in ([], [""]) and all(float(cell) < 1e-5 for cell in first)
        apart = max(abs(a - b) for a, b in zip(losses["native"], losses["chunked"], strict=True))
        # Both losses have 9 digits behind the point, and the page has two digits of their difference.
        assert float(table["native, chunked"][2]) == pytest.approx(apart, rel=0, abs=1e-9 + 0.06 * apart)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [NATIVE])
def test_losses_that_rounding_does_not_explain_are_not_written(backend, tiny, tmp_path, monkeypatch):
    right = saccade.operator._backends.native.run

    def wrong(call):
        out, lse = right(call)
        return out * (1 + 1e-4), lse

    monkeypatch.setattr(saccade.operator._backends.native, "fast_forward", lambda *_: None)
    monkeypatch.setattr(saccade.operator._backends.native, "run", wrong)
    with pytest.raises(AssertionError, match=r"^native: a loss differs by \d\.\de-0[3-6] from float64's"):
        training.main(tiny)
    assert not (tmp_path / "page.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [NATIVE])
def test_bf16_is_autocast(backend, tiny, tmp_path):
    training.main([*tiny, "--dtype", "bf16", "--steps", "2", "--long-steps", "2"])
    text = (tmp_path / "page.md").read_text()
    assert "bfloat16 autocast" in text and "--dtype bf16 --steps 2 --long-steps 2" in text
    apart = float(rows(text, "Context 29")["chunked, float64"][0])
    assert 1e-5 < apart < 0.1


@pytest.mark.parametrize("backend", [NATIVE, "chunked", "sdpa"])
def test_what_is_bound_computes_every_layer(backend, monkeypatch):
    """The clock counts calls and backward passes of the backend it is given, and the modules are left as they were."""
    before, chosen = training.place.attention, []
    module = saccade.operator._attention.BACKENDS[backend]
    run = module.run
    monkeypatch.setattr(saccade.operator._backends.native, "fast_forward", lambda *_: None)  # it passes `run` by
    monkeypatch.setattr(module, "run", lambda call: chosen.append(backend) or run(call))
    model, clock = training.Setting(13, 2, 1, 1, layers=3, heads=2, width=32).model(5), training.Clock()
    with training.bound(backend, clock):
        model(torch.zeros(2, 13, dtype=torch.int64)).sum().backward()
    assert chosen == [backend] * 3 and clock.calls == clock.returns == 3
    assert clock.forward > 0 and clock.backward > 0
    assert training.place.attention is before


def test_a_contender_that_goes_around_the_binding_is_refused(monkeypatch):
    setting = training.Setting(13, 2, 1, 1, layers=2, heads=2, width=32)
    contender = training.Contender("chunked", setting.model(5), setting.training(), "float32")
    monkeypatch.setattr(training, "bound", lambda backend, clock: contextlib.nullcontext())
    with pytest.raises(AssertionError, match="^chunked: 2 layers, 0 calls of attention"):
        contender.step(torch.zeros(2, 14, dtype=torch.int64))


@looped(("ulps", "passes"), [(0, True), (2, True), (4, False), (float("nan"), False)])
def test_native_is_allowed_twice_the_others_distance(ulps, passes):
    """Chunked is 1 unit of 2^-23 off and sdpa not at all: native may be 2, and the last bit of a loss in [2, 4)."""
    setting, exact = training.Setting(7, 1, 2, 2, layers=1, heads=1, width=4), [2.0, 3.0]
    contenders = []
    for name, off in (("native", ulps), ("chunked", 1), ("sdpa", 0), ("float64", 0)):
        contenders.append(training.Contender(name, setting.model(3), setting.training(), "float32"))
        contenders[-1].losses = [loss * (1 + off * 2.0**-23) for loss in exact]
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="^native: a loss differs"):
        training.check(contenders)


def test_the_loss_is_that_of_the_training_loop():
    windows, model = torch.randint(0, 5, (2, 14)), training.Setting(13, 2, 1, 1, layers=1, heads=1, width=8).model(5)
    assert torch.equal(training.loss_of(model(windows[:, :-1]), windows), objective.loss_of(model, windows))
