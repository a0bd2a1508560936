"""Sampling against plain definitions, and generation against the parallel forward."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from looped import looped
from saccade.models import Sampling, generate
from saccade.models.decoding.sampling import keep_top_k, keep_top_p
from saccade.models.generation import sample_tokens


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x) for x in logits]
    return [power / sum(powers) for power in powers]


def plain_distribution(logits, temperature, top_k, top_p) -> list[float]:
    """Divide, keep the k likeliest, keep the shortest likeliest list that reaches p, give them all the mass."""
    scaled = softmax([x / temperature for x in logits])
    ranked = sorted(range(len(scaled)), key=lambda i: -scaled[i])[: top_k or len(scaled)]
    if top_p is not None:
        mass = sum(scaled[i] for i in ranked)
        sums = list(itertools.accumulate(scaled[i] / mass for i in ranked))
        ranked = ranked[: next(n for n, total in enumerate(sums, 1) if total >= top_p or n == len(sums))]
    kept = sum(scaled[i] for i in ranked)
    return [scaled[i] / kept if i in ranked else 0.0 for i in range(len(scaled))]


@looped("temperature", [0.5, 1.0, 3.0])
@looped("top_k", [None, 1, 4, 100])
@looped("top_p", [None, 0.05, 0.6, 0.97, 1.0])
def test_distribution_is_the_plain_definition(temperature, top_k, top_p):
    logits = torch.randn(17) * 3
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = plain_distribution(logits.tolist(), temperature, top_k, top_p)
    torch.testing.assert_close(sampling.probabilities(logits), torch.tensor(expected), atol=1e-6, rtol=1e-4)


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([0.1, 3.0, 2.9, -1.0])
    assert Sampling(temperature=0.0).probabilities(logits).tolist() == [0, 1, 0, 0]


def test_top_k_keeps_equals_of_the_last():
    kept = keep_top_k(torch.tensor([1.0, 2.0, 2.0, 0.0, 5.0]), 2)
    assert kept.isinf().tolist() == [True, False, False, True, False]


def test_top_p_keeps_the_token_that_reaches_p():
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    assert keep_top_p(logits, 0.45).isinf().tolist() == [True, False, True]
    assert keep_top_p(logits, 0.55).isinf().tolist() == [True, False, False]
    assert keep_top_p(logits, 0.001).isinf().tolist() == [True, False, True]


def test_draws_follow_the_distribution(lm):
    """Likeliest first tokens come up about as often as they should: within five standard deviations."""
    sampling = Sampling(temperature=0.7, top_k=3)
    expected = sampling.probabilities(lm.model(torch.tensor([[lm.tokenizer.start]]))[0, -1])
    count = 211
    drawn = [
        next(sample_tokens(lm.model, [lm.tokenizer.start], 1, Sampling(temperature=0.7, top_k=3, seed=seed)))
        for seed in range(count)
    ]
    for token in range(lm.tokenizer.vocabulary):
        p = expected[token].item()
        assert abs(drawn.count(token) / count - p) <= 5 * math.sqrt(p * (1 - p) / count)


def test_generating_with_the_cache_is_generating_without(lm):
    prompt = [lm.tokenizer.start, *lm.tokenizer.encode("the cat").ids]
    with_cache = list(sample_tokens(lm.model, prompt, 9, Sampling(temperature=0.0)))
    without = list(prompt)
    for _ in range(9):
        without.append(int(lm.model(torch.tensor([without]))[0, -1].argmax()))
    assert with_cache == without[len(prompt) :]


def test_the_same_seed_writes_the_same_text(lm):
    def text(seed):
        return "".join(generate(lm, "the", 12, Sampling(seed=seed)))

    before = torch.get_rng_state()
    assert text(3) == text(3)
    assert text(3) != text(4)
    assert torch.equal(torch.get_rng_state(), before)


def test_stops_at_the_end_of_the_context(lm):
    prompt = [lm.tokenizer.start, 5, 6]
    drawn = list(sample_tokens(lm.model, prompt, 1000, Sampling(temperature=0.0)))
    assert len(prompt) + len(drawn) == lm.model.config.context


def test_a_start_token_ends_the_text(lm, monkeypatch):
    letters = lm.tokenizer.encode("ab").ids
    monkeypatch.setattr(
        "saccade.models.generation.sample_tokens", lambda *_: iter([*letters, lm.tokenizer.start, *letters])
    )
    assert "".join(generate(lm, "the")) == "ab"


def test_a_prompt_that_fills_the_context_is_refused_at_once(lm):
    fits = "\n" * (lm.model.config.context - 2)
    assert len(list(generate(lm, fits, 5))) == 1
    with pytest.raises(ValueError, match="prompt: 23 tokens with the start token; the model's context of 23 must hold"):
        generate(lm, fits + "\n", 5)


@looped(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature: must be finite and not negative, got -0.1"),
        ({"temperature": math.inf}, "temperature: .* got inf"),
        ({"temperature": math.nan}, "temperature: .* got nan"),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
        ({"seed": 2**64}, "seed: must be a 64-bit integer, got 18446744073709551616"),
        ({"top_p": 0.0}, r"top_p: must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p: must be in \(0, 1\], got 1.1"),
    ],
)
def test_bad_sampling(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
