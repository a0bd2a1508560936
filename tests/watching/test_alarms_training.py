"""Training runs broken on purpose: the right alarm fires, and before the loss shows what is wrong.

Shapes: B batch, L length.
"""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from saccade.models import DecoderLM, ModelConfig
from saccade.watching import AttentionMonitor

B, L = 16, 48
EVERY = 5


def letters() -> torch.Tensor:
    """A text of 400 made-up words, some far more frequent than others, letter by letter."""
    draw = random.Random(0)
    words = ["".join(draw.choice("abcdefghijklmnop") for _ in range(draw.randint(2, 6))) for _ in range(400)]
    text = " ".join(draw.choices(words, weights=[1 / (n + 1) for n in range(400)], k=6000))
    alphabet = sorted(set(text))
    return torch.tensor([alphabet.index(letter) for letter in text])


def run(steps, rate, *, doubled_every=None, scale=None, **shape):
    """Train; the monitor, and each step's loss."""
    text = letters()
    torch.manual_seed(0)
    lm = DecoderLM(ModelConfig(17, layers=2, context=L, **shape))
    if scale is not None:
        for block in lm.decoder.blocks:
            block.attention.config = dataclasses.replace(block.attention.config, scale=scale)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate)
    monitor = AttentionMonitor(lm, log=False, every=EVERY, on_alarm=lambda alarm: None)
    losses = []
    for step in range(steps):
        if doubled_every and step and step % doubled_every == 0:
            optimizer.param_groups[0]["lr"] *= 2
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
    threads(1)
    monitor, losses = run(200, 1e-3, doubled_every=20, width=48, heads=3, hidden=96)
    mean = smooth(losses, 5)
    lowest = [min(mean[: n + 1]) for n in range(len(mean))]
    above = [now > 1.2 * low for now, low in zip(mean, lowest, strict=True)]
    # The loss shows it from where its mean over five steps stays a fifth above its lowest.
    shows = next(n for n in range(len(above)) if all(above[n:]))
    found = first_steps(monitor)
    assert found["entropy collapse"] <= shows - 2 * EVERY
    assert found["saturated softmax"] <= shows - 2 * EVERY
    assert found["logit growth"] < shows
    assert found["entropy collapse"] > 80  # not before the rate is 16 times what it was
    assert shows < len(losses) - 10
    alarm = next(alarm for alarm in monitor.alarms if alarm.kind == "entropy collapse")
    assert alarm.numbers["highest_evenness"] > 0.7 > 0.1 >= alarm.numbers["evenness"]


@pytest.mark.slow
def test_a_scale_left_out_is_told_before_the_loss_shows_it(threads):
    threads(1)
    shape = {"width": 64, "heads": 1, "hidden": 128}
    monitor, losses = run(70, 3e-3, scale=1.0, **shape)
    healthy, expected = run(70, 3e-3, **shape)
    assert healthy.alarms == []
    # Both fall; the loss shows it from where its mean over ten steps is a tenth above the healthy twin's.
    pairs = list(zip(smooth(losses, 10), smooth(expected, 10), strict=True))
    shows = next(n for n in range(len(pairs)) if all(ours > 1.1 * theirs for ours, theirs in pairs[n:]))
    found = first_steps(monitor)
    assert found["saturated softmax"] <= shows - 2 * EVERY
    assert found["saturated softmax"] <= 30


@pytest.mark.slow
def test_the_same_run_at_a_fitting_rate_sets_off_nothing(threads):
    threads(1)
    monitor, losses = run(200, 3e-3, width=48, heads=3, hidden=96)
    assert monitor.alarms == []
    assert all(later < earlier for earlier, later in pairwise(smooth(losses, 20)[19::60]))
