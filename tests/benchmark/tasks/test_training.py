"""One run: the same every time, judged on what it never saw, with the better of its learning rates."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from looped import looped
from saccade.benchmark.tasks import (
    UNASKED,
    Copy,
    Induction,
    ModelShape,
    Recall,
    TrainingBudget,
    contender_named,
    run,
    training,
)
from saccade.benchmark.tasks.examples import digests
from slowly import slow_but

TASK = Recall(vocabulary=12, length=8, pairs=(1, 2))
SHAPE = ModelShape(width=16)
BUDGET = TrainingBudget(steps=300, batch=16, rates=(1e-2,), warmup=10, every=20, held=128)


def numbers(outcome):
    """What must not depend on anything but the arguments."""
    return dataclasses.replace(outcome, seconds=0.0, cpu_seconds=0.0)


@pytest.mark.slow
def test_attention_learns_a_small_task():
    told, budget = [], dataclasses.replace(BUDGET, rates=(1e-2, 1e-9))
    outcome = run(contender_named("exact"), TASK, 0, SHAPE, budget, lambda step, right: told.append((step, right)))
    assert outcome.right >= 0.99 and outcome.rate == 1e-2
    assert all(share >= 0.98 for share in outcome.by_group)
    # Solved with the first rate: the second is not tried.
    assert [step for step, _ in told] == list(range(20, outcome.steps + 1, 20))
    if outcome.steps < BUDGET.steps:
        assert [right >= training.SURE for _, right in told[-2:]] == [True, True]
    assert outcome.cpu_seconds > 0 and outcome.seconds > 0


NAMES = ["exact", "linear", "performer:features=8", "reformer:buckets=2,chunk=4", "GRU"]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(NAMES, "linear"))
def test_the_same_seed_gives_the_same_numbers(name):
    budget = dataclasses.replace(BUDGET, steps=12, every=6, rates=(1e-2, 1e-3))
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = run(contender_named(name), TASK, 3, SHAPE, budget)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(8)
    second = run(contender_named(name), TASK, 3, SHAPE, budget)
    assert numbers(first) == numbers(second)
    assert numbers(run(contender_named(name), TASK, 4, SHAPE, budget)) != numbers(first)


def test_the_generator_is_left_as_it_was_after_an_error(monkeypatch):
    monkeypatch.setattr(training, "_train", lambda *given: torch.rand(3) / 0 + None)
    before = torch.get_rng_state()
    with pytest.raises(TypeError):
        run(contender_named("exact"), TASK, 0, SHAPE, BUDGET)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_nothing_that_is_judged_is_learned(monkeypatch):
    """Of a task of 20 words, most held-out words come up in training; then nothing is asked of them."""
    task = Copy(symbols=5, least=2, most=2)
    asked, known = set(), []
    real = training.never_seen

    def recorded(examples, held):
        known.append(held)
        kept = real(examples, held)
        asked.update(digests(kept.tokens[(kept.targets != UNASKED).any(1)]).tolist())
        return kept

    monkeypatch.setattr(training, "never_seen", recorded)
    drawn = []
    real_draw = Copy.draw

    def draw(self, count, random):
        examples = real_draw(self, count, random)
        drawn.append(examples.tokens)
        return examples

    monkeypatch.setattr(Copy, "draw", draw)
    run(contender_named("exact"), task, 0, SHAPE, TrainingBudget(steps=40, batch=4, rates=(1e-3,), every=20, held=6))
    judged, validation = drawn[:2]
    assert judged.shape[0] == 6 and validation.shape[0] == 3
    held = set(digests(torch.cat((judged, validation))).tolist())
    assert all(set(each.tolist()) == held for each in known)
    assert asked and not asked & held
    assert held & set(digests(torch.cat(drawn[2:])).tolist())  # they did come up


def test_the_streams_of_a_run_differ_and_so_do_runs():
    seeds = [
        training._part_seed(seed, part) for seed in range(7) for part in ("weights", "training", "validation", "judged")
    ]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(1e-9, 1e-2), (1e-2, 1e-9)], ids=["better last", "better first"])
def test_a_rate_that_does_not_solve_is_followed_by_the_next_and_the_better_counts(rates):
    short, told = dataclasses.replace(BUDGET, steps=60), []
    both = dataclasses.replace(short, rates=rates)
    outcome = run(contender_named("exact"), TASK, 0, SHAPE, both, lambda step, right: told.append(step))
    assert numbers(outcome) == numbers(run(contender_named("exact"), TASK, 0, SHAPE, short))
    assert outcome.rate == 1e-2 and told == [20, 40, 60, 20, 40, 60]


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine():
    budget = TrainingBudget(steps=110, warmup=10)
    assert [budget.rate_at(step, 2.0) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])
    assert budget.rate_at(60, 2.0) == pytest.approx(1 + math.cos(math.pi * 50 / 101))
    falling = [budget.rate_at(step, 2.0) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True) and 0 < falling[-1] < 0.001
    assert TrainingBudget(steps=5, warmup=50).rate_at(5, 1.0) == 0.1


def test_only_answers_are_learned_from(monkeypatch):
    """The loss is the mean over the answers: what stands at other places has no target."""
    task, seen = Induction(symbols=3, length=5), []
    real = torch.nn.functional.cross_entropy
    monkeypatch.setattr(training.F, "cross_entropy", lambda *a, **k: seen.append((a[0].shape, a[1])) or real(*a, **k))
    run(contender_named("exact"), task, 0, SHAPE, TrainingBudget(steps=2, batch=64, rates=(1e-3,), held=2))
    for shape, targets in seen:
        assert shape == (len(targets), 4) and 0 < len(targets) <= 64 and (targets > 0).all()


@looped(
    ("options", "message"),
    [
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"batch": 0}, "batch: must be at least 1, got 0"),
        ({"held": 1}, "held: must be at least 2, got 1"),
        ({"rates": ()}, "rates: expected at least one learning rate, got none"),
        ({"rates": (1e-3, -1.0)}, "rates: must be positive, got -1.0"),
        ({"rates": (math.nan,)}, "rates: must be finite, got nan"),
    ],
)
def test_budgets_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainingBudget(**options)
