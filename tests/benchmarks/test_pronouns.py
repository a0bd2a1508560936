"""The study of pronouns: its sentences are balanced, and its statistics find what was put in and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.inspection import collect, open_model
from saccade.models import load

FOLDER = Path(__file__).parents[2] / "benchmarks"
N, F, S, H = 14, 6, 3, 32


@pytest.fixture
def pronouns(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import pronouns

    return pronouns


@pytest.fixture
def kinds(pronouns):
    return pronouns.KINDS


def text_of(model, one):
    return model.lm.tokenizer.decode(one.ids)


@pytest.mark.slow
def test_sentences_of_a_case_differ_in_the_order_and_the_deciding_word_alone(pronouns, kinds):
    model = open_model()
    for kind in kinds:
        nouns = [noun for pair in kind.pairs for noun in pair]
        assert len(set(nouns)) == len(nouns), kind.name
        made = pronouns.sentences(model, kind)
        assert len(made) == len(kind.pairs) * len(kind.frames) * 4
        for (n, f, first, meant), one in made.items():
            text, nouns = text_of(model, one), kind.pairs[n]
            decides = kind.words(n, f)[meant]
            assert text == kind.frames[f].format(a=nouns[first], b=nouns[1 - first], d=decides)
            if not kind.behind:
                for noun, pieces in zip(nouns, one.nouns, strict=True):
                    assert model.lm.tokenizer.decode([one.ids[i] for i in pieces]).strip() == noun
            assert one.ids[one.looks[-1]] == one.ids[-1] or kind.behind
            if kind.by_pronoun:
                told = [model.lm.tokenizer.decode([one.ids[i]]).strip() for i in one.looks[:2]]
                assert told[0] == decides and re.search(rf"\b{decides} {told[1]}", text)
            other = made[n, f, first, 1 - meant]
            decided = min(one.looks[0], other.looks[0]) if kind.spots[0] != "it" else one.looks[0] + 1
            assert kind.behind or one.ids[:decided] == other.ids[:decided]


@pytest.mark.slow
def test_weights_on_nouns_are_those_of_a_look(pronouns, kinds):
    model = open_model()
    kind = kinds[1]
    made = pronouns.sentences(model, kind)
    nouns = ("king", "chair")  # one of several pieces
    one = made[kind.pairs.index(nouns), 0, 1, 1]  # swapped; the second is meant
    (found,) = pronouns.weights_on_nouns(model, [one])  # (S, H, 2)
    seen = collect(model, "The chair stood near the king because it could not be moved.")
    words = [word.text for word in seen.words]
    for noun, name in enumerate(nouns):
        expected = seen.weights[:, :, words.index("it"), words.index(name)].reshape(-1)
        np.testing.assert_allclose(found[0, :, noun], expected, atol=1e-6)


def test_the_number_of_a_case_is_nil_for_place_noun_and_frequency(pronouns):
    random = np.random.default_rng(0)
    by_noun = random.random((N, 1, 1, 1, 1, H, 2))
    by_place = np.zeros((1, F, 2, 1, S, H, 2))
    by_place[:, :, 0, ..., 0] = by_place[:, :, 1, ..., 1] = 0.7  # whichever stands first
    weights = np.broadcast_to(by_noun + by_place, (N, F, 2, 2, S, H, 2)).copy()
    assert abs(pronouns.right_minus_wrong(weights)).max() < 1e-12
    assert (pronouns.share_right(weights) == 0.5).all()
    weights[:, :, :, 0, 1, 5, 0] += 0.1  # the first word: to the first noun; the second: to the second
    weights[:, :, :, 1, 1, 5, 1] += 0.1
    found = pronouns.right_minus_wrong(weights)
    np.testing.assert_allclose(found[:, :, 1, 5], 0.1)
    found[:, :, 1, 5] = 0
    assert abs(found).max() < 1e-12


def noise(random, effect=0.0):
    """(N, F, H): noun pairs differ more than frames do; head 7 has an effect."""
    values = random.normal(size=(N, 1, H)) * 0.1 + random.normal(size=(N, F, H)) * 0.05
    values[..., 7] += effect
    return values


def test_the_best_head_of_noise_is_luck_and_the_held_out_half_says_so(pronouns):
    random = np.random.default_rng(1)
    chosen, left, covered = [], [], []
    for _ in range(200):
        for one in pronouns.held_out(noise(random)):
            chosen.append(one.chosen_on)
            left.append(float(one.found.mean))
            covered.append(not one.found.clear)
    assert np.mean(chosen) > 0.05  # biased upward: the largest of 32
    assert abs(np.mean(left)) < 4 * np.std(left) / len(left) ** 0.5
    assert 0.92 < np.mean(covered) < 0.98


def test_halves_share_no_pair_and_no_frame(pronouns):
    values = np.zeros((N, F, H))
    values[0::2, 0::2, 3] = 1.0  # seen where it is chosen, gone elsewhere
    values[1::2, 1::2, 9] = 0.5
    values[0::2, 1::2] = values[1::2, 0::2] = np.nan  # belongs to neither half
    even, odd = pronouns.held_out(values)
    assert (even.head, even.chosen_on, float(even.found.mean), even.reported_on) == (9, 0.5, 0.0, 0)
    assert (odd.head, odd.chosen_on, float(odd.found.mean), odd.reported_on) == (3, 1.0, 0.0, 1)


def test_a_head_with_an_effect_is_found_and_its_size_is_right(pronouns):
    random = np.random.default_rng(2)
    found = [one for _ in range(100) for one in pronouns.held_out(noise(random, effect=0.3))]
    assert all(one.head == 7 for one in found)
    assert abs(np.mean([float(one.found.mean) for one in found]) - 0.3) < 0.01
    assert 0.90 < np.mean([abs(float(one.found.mean) - 0.3) < float(one.found.half) for one in found]) < 0.99


def test_widened_intervals_call_no_head_of_noise_clear(pronouns):
    random = np.random.default_rng(3)
    wrong = [pronouns.over_pairs(noise(random).mean(1), H).clear.any() for _ in range(400)]
    assert np.mean(wrong) < 0.09  # 5 in 100 families of 32
    plain = [pronouns.over_pairs(noise(random).mean(1)).clear.any() for _ in range(400)]
    assert np.mean(plain) > 0.6
    seen = pronouns.over_pairs(noise(random, effect=0.3).mean(1), H)
    assert np.flatnonzero(seen.clear).tolist() == [7]


def test_log_odds_are_nil_for_a_likelier_word_and_a_likelier_text(pronouns):
    given, told = np.array([[0.0], [3.0]]), np.array([[-1.0, -5.0]])
    values = np.broadcast_to(given + told, (N, 5, 2, 2)).copy()
    assert abs(pronouns.log_odds(values)).max() < 1e-12
    values[..., 0, 0] += 0.4
    values[..., 1, 1] += 0.4
    np.testing.assert_allclose(pronouns.log_odds(values), 0.4)


def test_log_probabilities_are_those_of_each_text_alone(pronouns):
    lm = load()
    asked = [("The old man saw", " the house"), ("She", " was"), ("It was the best of times, it was", " the princess")]
    found = pronouns.log_probabilities(lm, asked)
    for (before, told), came in zip(asked, found, strict=True):
        known, ids = lm.tokenizer.encode(before).ids, lm.tokenizer.encode(before + told).ids
        assert ids[: len(known)] == known
        with torch.no_grad():
            logits = lm.model(torch.tensor([[lm.tokenizer.start, *ids]]))[0].double()
        expected = sum(float(logits[i].log_softmax(-1)[ids[i]]) for i in range(len(known), len(ids)))
        assert abs(came - expected) < 1e-4
