"""What reads q, k and v: right where it should be, and its decoding step is its own last row."""

from __future__ import annotations

import pytest
import torch

from looped import looped
from saccade.benchmark.variants import ProblemSizes
from saccade.benchmark.variants.catalogue import all_contenders, chosen_contenders, contender_named
from saccade.benchmark.variants.data import normal
from saccade.benchmark.variants.measuring import distance, exact_rows
from saccade.benchmark.variants.readings import PATTERNS, VariantAttention

SIZES = ProblemSizes(2, 6, 6, 8, 8, 67, True)
READINGS = [one for one in all_contenders(layers=False)]
ROWS = torch.arange(67)


def runner(one, sizes=SIZES):
    return one.build(sizes, normal(sizes, seed=3), seed=5)


def taking(causal):
    return [one for one in READINGS if not one.refusal(SIZES._replace(causal=causal))]


@pytest.mark.slow
@looped("one", READINGS)
@looped("causal", [True, False])
def test_everyone_runs_or_says_why_not(one, causal):
    sizes = SIZES._replace(causal=causal)
    reason = one.refusal(sizes)
    if reason:
        assert len(reason.split()) > 4
        return
    made = runner(one, sizes)
    out = made.forward()
    assert out.shape == made.aligned(torch.zeros(2, 6, 67, 8)).shape
    assert out.isfinite().all()
    gradients = made.training()()
    assert len(gradients) == len(made.leaves)
    for gradient in gradients[: made.inputs]:
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


@looped("one", taking(causal=True))
def test_a_step_is_the_last_row(one):
    made = runner(one)
    with torch.no_grad():
        last = made.forward()[:, :, -1:]
        if isinstance(made.decoding, str):
            assert len(made.decoding.split()) > 4
            return
        decoding = made.decoding()
        assert distance(decoding.step(), last).worst < 1e-4
        assert distance(decoding.step(), last).worst < 1e-4  # a step leaves what it keeps as it was
    assert decoding.kept > 0


@looped("one", taking(causal=False))
def test_without_time_there_is_no_step(one):
    assert "direction of time" in runner(one, SIZES._replace(causal=False)).decoding


@looped("causal", [True, False])
@looped("kv_heads", [6, 2])
def test_exact_attention_is_the_formula(causal, kv_heads):
    sizes = SIZES._replace(causal=causal, kv_heads=kv_heads, value_head=5)
    tensors = normal(sizes, seed=1)
    out = chosen_contenders(["exact"], layers=False)[0].build(sizes, tensors, 0).forward()
    query, key, value = (one.double() for one in tensors)
    key, value = (one.repeat_interleave(6 // kv_heads, 1) for one in (key, value))
    logits = query @ key.mT / 8**0.5
    hidden = torch.full((67, 67), causal).triu(1)
    right = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ value
    torch.testing.assert_close(exact_rows(*tensors, ROWS, causal=causal), right, atol=1e-12, rtol=1e-12)
    assert distance(out, right).worst < 1e-5


@looped("pattern", PATTERNS)
def test_a_pattern_is_softmax_over_its_mask(pattern):
    """Also where its settings are given, and with less than all keys: an error is there, and it is the mask's."""
    assert not pattern.refusal(SIZES)
    tensors = normal(SIZES, seed=3)
    out = runner(pattern).forward()
    query, key, value = (one.double() for one in tensors)
    seen = pattern.mask(SIZES).dense(67, 67)
    right = (query @ key.mT / 8**0.5).masked_fill(~seen, float("-inf")).softmax(-1) @ value
    assert distance(out, right).worst < 1e-5


def test_settings_change_a_pattern():
    window = contender_named("window:size=3")
    assert window.setting(99) == "size=3"
    assert int(window.mask(SIZES).dense(67, 67).sum(-1).max()) == 3
    made = runner(window)
    assert made.decoding().kept == 2 * 2 * 6 * 3 * 8 * 4  # keys and values of three tokens
    streaming = runner(contender_named("streaming:window=5,sinks=2"))
    assert streaming.decoding().kept == 2 * 2 * 6 * 7 * 8 * 4


def test_a_window_longer_than_the_sequence_is_exact():
    out = runner(contender_named("window:size=99")).forward()
    assert distance(out, exact_rows(*normal(SIZES, seed=3), ROWS, causal=True)).worst < 1e-5


def test_parameters_come_from_the_seed_and_the_generator_stays():
    before = torch.get_rng_state()
    performer = contender_named("performer")
    first, again, other = (performer.build(SIZES, normal(SIZES, 3), seed).forward() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_what_shares_queries_and_keys_is_not_judged_as_an_approximation():
    reformer = contender_named("reformer")
    assert reformer.computes == "other"
    assert runner(reformer).inputs == 2


@looped("name", [one.name for one in READINGS if isinstance(one, VariantAttention)])
def test_grouped_heads_run_or_say_why_not(name):
    one, sizes = contender_named(name), SIZES._replace(kv_heads=3)
    reason = one.refusal(sizes)
    assert reason or runner(one, sizes).forward().isfinite().all()


def test_names():
    names = [one.name for one in all_contenders()]
    assert names[0] == "exact"
    assert {"attention", "LSTM", "GRU", "convolutions", "dilated-convolutions", "connected"} < set(names)
    assert len(set(names)) == len(names)
    assert [one.name for one in chosen_contenders(["GRU", "linear"])] == ["exact", "linear", "attention", "GRU"]
    assert [one.name for one in chosen_contenders(["linear"], layers=False)] == ["exact", "linear"]
    assert [one.name for one in chosen_contenders(None)] == names


def test_settings_of_a_mechanism():
    one = contender_named("linear:feature_map=relu")
    assert one.name == "linear:feature_map=relu"
    assert "relu" in one.setting(64)
    assert not torch.equal(runner(one).forward(), runner(contender_named("linear")).forward())


@looped(
    ("name", "words"),
    [
        ("beads", "mechanism: expected one of exact, window, .*; got 'beads'"),
        ("window:size", "mechanism: expected whole numbers as name=number, got 'window:size'"),
        ("window:size=x", "mechanism: expected whole numbers as name=number, got 'window:size=x'"),
        ("window:beads=3", "mechanism: window has no setting 'beads', expected size"),
        ("window:size=0", "size"),
        ("GRU:layers=2", "mechanism: GRU has no settings, got 'GRU:layers=2'"),
    ],
)
def test_names_that_nobody_has(name, words):
    with pytest.raises(ValueError, match=words):
        contender_named(name)
