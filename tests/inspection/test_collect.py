from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pretend_lm import PretendLM, broad, itself, mostly_first_word, previous, sink

from saccade.inspection import collect, here, telling, words_that_fit
from saccade.inspection._collect import observe_weights

TEXT = "Seven catalogues stood, untouched, on the shelves."


def token_maps(lm, text):
    ids = torch.tensor([[lm.tokenizer.start, *lm.tokenizer.encode(text).ids]])
    seen = {}
    observe_weights(lm, ids, lambda layer, weights: seen.update({layer: weights[0]}))
    return torch.stack([seen[i] for i in sorted(seen)]).double().numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_words_sum_over_key_pieces_and_average_over_query_pieces(size):
    lm = PretendLM([[mostly_first_word, previous, broad], [itself, sink, mostly_first_word]], size=size)
    seen = collect(lm, TEXT)
    tokens = token_maps(lm, TEXT)
    assert seen.weights.shape == (2, 3, 11, 11)
    assert [w.text for w in seen.words[1:4]] == ["Seven", "catalogues", "stood"]
    for q, query in enumerate(seen.words):
        for k, key in enumerate(seen.words):
            by_hand = tokens[:, :, query.first : query.last, key.first : key.last].sum(-1).mean(-1)
            assert np.allclose(seen.weights[:, :, q, k], by_hand, atol=1e-12)
    # Each token row is float32 and sums to 1 up to its rounding, a few units in the last place a key.
    assert np.abs(seen.weights.sum(-1) - 1).max() < len(tokens[0, 0]) * np.finfo(np.float32).eps
    assert not np.triu(seen.weights, 1).any()


def test_known_patterns_come_out_as_written():
    lm = PretendLM([[previous, itself, sink]])
    weights = collect(lm, TEXT).weights[0]
    rows = np.arange(1, 11)
    assert np.allclose(weights[0][rows, rows - 1], 1) and np.allclose(weights[1][rows, rows], 1)
    assert np.allclose(weights[2][:, 0], 1)


def test_entropy_is_of_the_words_in_nats():
    seen = collect(PretendLM([[broad, sink]]), TEXT)
    uniform = np.mean([math.log(q + 1) for q in range(1, 11)])
    assert math.isclose(seen.entropy()[0, 0], uniform, rel_tol=1e-5)
    assert seen.entropy()[0, 1] < 1e-6


def test_a_model_in_training_mode_is_left_so():
    lm = PretendLM([[broad]])
    lm.model.train()
    collect(lm, TEXT)
    assert lm.model.training


def test_a_text_without_words_and_one_that_is_too_long():
    lm = PretendLM([[broad]], context=7)
    with pytest.raises(ValueError, match="text: expected at least one word"):
        collect(lm, " \t ")
    told = r"text: it has 10 words and marks, and this model reads 6 tokens at once, .* first 6 of them"
    with pytest.raises(ValueError, match=told):
        collect(lm, TEXT)
    assert words_that_fit(lm, TEXT) == 6
    assert collect(lm, "Seven catalogues stood, untouched,").pieces == 6


def test_words_that_fit_counts_pieces_and_copes_with_many_blanks():
    lm = PretendLM([[broad]], context=8, size=4)
    assert words_that_fit(lm, "Seven catalogues") == 2  # 2 + 3 pieces
    assert words_that_fit(lm, "Seven catalogues stood, on") == 3
    assert words_that_fit(lm, "catalogues" * 9) == 0
    assert collect(lm, "Seven catalogues on" + " " * 9).words[-1].last == 7
    assert words_that_fit(PretendLM([[broad]], context=601), "a" + " " * 551 + "b") == 2


def test_here_names_a_heads_habits_on_this_text():
    text = "the dog saw the cat."
    lm = PretendLM([[previous, itself, sink, broad]])
    seen = collect(lm, text)
    habits = here(seen)
    assert np.allclose([habits["previous"][0, 0], habits["self"][0, 1], habits["sink"][0, 2]], 1)
    assert np.isnan(habits["delimiter"]).all()  # nothing comes after the full stop
    marked = here(collect(lm, "the dog, the cat."))["delimiter"][0]
    assert math.isclose(marked[3], (1 / 5 + 1 / 6 + 2 / 7) / 3, rel_tol=1e-5)
    assert np.allclose(marked[:3], [1 / 3, 1 / 3, 0])  # "the" looks back at the comma, the full stop stays on itself
    assert math.isclose(habits["duplicate"][0, 3], 1 / 5, rel_tol=1e-5)  # the second "the" on the first
    assert math.isclose(habits["repeat"][0, 3], 1 / 5, rel_tol=1e-5)  # ... and on "dog"
    assert np.allclose(habits["broad"][0, 3], 1)
    assert np.isnan(here(collect(lm, "the dog saw a cat."))["repeat"]).all()


def test_telling_is_zero_for_what_was_expected_and_the_gain_in_nats_otherwise():
    same = np.tril(np.ones((7, 7)) / np.arange(1, 8)[:, None])
    assert np.allclose(telling(same), 0)
    one = np.zeros((7, 7))
    one[:, 0] = 1
    one[5] = 0
    one[5, 3] = 1
    # Of four other rows one looks two words back; that is more than the sixth of looking everywhere alike.
    expected = 1 / 4
    assert math.isclose(telling(one)[5, 3], math.log(1 / expected))
    assert np.allclose(np.delete(telling(one), 5, 0)[2:, 1:], 0)
