"""Training runs broken on purpose: the right alarm fires, and before the loss shows what is wrong.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise
from statistics import median

import pytest
import torch
import torch.nn.functional as F

from saccade.models import DecoderLM, ModelConfig
from saccade.monitoring import AttentionMonitor

B, L = 16, 48
EVERY = 5


def spelled(words: list[str]) -> torch.Tensor:
    """A text, letter by letter."""
    return torch.tensor(["abcdefghijklmnop ".index(letter) for letter in " ".join(words)])


def made_up(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 6))) for _ in range(count)]


def frequent() -> torch.Tensor:
    """Words of which some are far more frequent than others: the loss has little to fall."""
    draw = random.Random(0)
    return spelled(draw.choices(made_up(draw, 400), weights=[1 / (n + 1) for n in range(400)], k=6000))


def chained() -> torch.Tensor:
    """Words each of which only four others follow: the loss has far to fall, if one looks back."""
    draw = random.Random(0)
    words = made_up(draw, 40)
    follow = {word: draw.choices(words, k=4) for word in words}
    text = [words[0]]
    for _ in range(4000):
        text.append(draw.choice(follow[text[-1]]))
    return spelled(text)


def run(text, steps, rate, *, seed=0, scale=None, **shape):
    """Train; the monitor, and each step's loss."""
    torch.manual_seed(seed)
    lm = DecoderLM(ModelConfig(17, layers=2, context=L, **shape))
    if scale is not None:
        for block in lm.decoder.blocks:
            block.attention.config = dataclasses.replace(block.attention.config, scale=scale)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate)
    monitor = AttentionMonitor(lm, log=False, every=EVERY, on_alarm=lambda alarm: None)
    losses = []
    for step in range(steps):
        starts = torch.randint(0, len(text) - L - 1, (B,), generator=torch.Generator().manual_seed(step))
        windows = torch.stack([text[at : at + L + 1] for at in starts.tolist()])
        with monitor.step(step):
            loss = F.cross_entropy(lm(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return monitor, losses


def smooth(losses, width):
    return [sum(losses[max(0, n + 1 - width) : n + 1]) / min(n + 1, width) for n in range(len(losses))]


def first_steps(monitor):
    """Of each kind the step at which it fired first."""
    found: dict[str, int] = {}
    for alarm in monitor.alarms:
        found.setdefault(alarm.kind, alarm.step)
    return found


@pytest.mark.slow
def test_entropy_collapse_is_told_before_the_loss_shows_it(threads):
    """In the middle one of five runs: at rates so high the last bit of a product decides when a head collapses."""
    threads(1)
    fired, shown, off = [], [], []
    for seed in range(5):
        (quiet, _), (_, fitting), (monitor, losses) = (
            run(frequent(), 160, rate, seed=seed, width=48, heads=3, hidden=96) for rate in (0.008, 0.016, 0.032)
        )
        assert quiet.alarms == []
        found = first_steps(monitor)
        assert {"entropy collapse", "saturated softmax", "logit growth"} <= found.keys()
        mean, half_the_rate = smooth(losses, 5), smooth(fitting, 5)
        # Where it fires the loss falls as ever; it shows later, from where it stays a sixth above that of half the
        # rate.
        at = found["entropy collapse"]
        above = [ours > 7 / 6 * theirs for ours, theirs in zip(mean, half_the_rate, strict=True)]
        fired.append(at)
        shown.append(next((n for n in range(len(above)) if all(above[n:])), len(above)))
        off.append(mean[at] / min(mean[: at + 1]))
        alarm = next(alarm for alarm in monitor.alarms if alarm.kind == "entropy collapse")
        assert alarm.numbers["highest_evenness"] > 0.7 > 0.1 >= alarm.numbers["evenness"]
    assert median(off) <= 1.02
    assert median(fired) <= median(shown) - 2 * EVERY
    assert median(shown) < 160 - 10


@pytest.mark.slow
def test_a_scale_left_out_is_told_before_the_loss_shows_it(threads):
    threads(1)
    shape = {"width": 64, "heads": 1, "hidden": 128}
    fired, shown = [], []
    for seed in range(5):
        monitor, losses = run(chained(), 70, 3e-3, seed=seed, scale=1.0, **shape)
        healthy, expected = run(chained(), 70, 3e-3, seed=seed, **shape)
        assert healthy.alarms == []
        # Both fall; the loss shows it from where its mean over ten steps is a tenth above the healthy twin's.
        pairs = list(zip(smooth(losses, 10), smooth(expected, 10), strict=True))
        shown.append(next(n for n in range(len(pairs)) if all(ours > 1.1 * theirs for ours, theirs in pairs[n:])))
        fired.append(first_steps(monitor)["saturated softmax"])
    assert median(fired) <= median(shown) - EVERY
    assert max(fired) <= 20


@pytest.mark.slow
def test_the_same_run_at_a_fitting_rate_sets_off_nothing(threads):
    threads(1)
    monitor, losses = run(chained(), 150, 3e-3, width=48, heads=3, hidden=96)
    assert monitor.alarms == []
    assert all(later < earlier for earlier, later in pairwise(smooth(losses, 20)[19::40]))
