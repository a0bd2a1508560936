"""Scores of one text: heads with known habits, chance, and a dense oracle that goes pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pretend import PretendModel, duplicating, evenly, first, following, inducing, itself, last, previous, randomly

from saccade import Causal, Window
from saccade.analysis import SCORES
from saccade.analysis._scores import DORMANT, FEW, ON_REPEATS, mark, measure_text

TEXT = """The cat sat on the mat, and the dog saw the cat.
Then the dog ran to the mat; the cat ran, too!
Nobody saw the old man."""
NAMES = ("previous", "next", "self", "first", "delimiter", "punctuation", "induction", "duplicate")


def measured(model, text=TEXT, seed=0):
    tokens = mark(model, text)
    return tokens, measure_text(model, tokens, np.random.default_rng(seed))


def is_word(piece):
    return any(c.isalnum() for c in piece)


class Oracle:
    """The definitions, row by row and target by target, on a dense matrix of weights."""

    def __init__(self, model, text, mask):
        found = model.encode(text)
        pieces = [text[a:b] for a, b in found.spans]
        ahead, behind = len(model.before), len(model.after)
        self.pieces = [None] * ahead + pieces + [None] * behind
        self.ids = [*model.before, *found.ids, *model.after]
        self.length = len(self.ids)
        self.seen = np.ones((self.length, self.length), bool) if mask is None else mask

    def targets(self, name, i):
        pieces, ids = self.pieces, self.ids
        if name in ("previous", "next", "self"):
            j = i + {"previous": -1, "next": 1, "self": 0}[name]
            return {j} if 0 <= j < self.length else set()
        if name == "first":
            return {0}
        if name == "delimiter":
            return {j for j in range(self.length) if (j > 0 and pieces[j] is None) or pieces[j] == "\n"}
        if name == "punctuation":
            return {j for j in range(self.length) if pieces[j] not in (None, "\n") and not is_word(pieces[j])}
        if pieces[i] is None or not is_word(pieces[i]):
            return set()
        shift = 1 if name == "induction" else 0
        return {j + shift for j in range(i) if ids[j] == ids[i] and j + shift < i}

    def score(self, name, weights):
        """(score, chance), NaN where no row counts."""
        scores, chances = [], []
        for i in range(self.length):
            seen = {j for j in range(self.length) if self.seen[i, j]}
            targets = self.targets(name, i) & seen
            if self.pieces[i] is not None and len(seen) > FEW and targets:
                scores.append(sum(weights[i, j] for j in targets))
                chances.append(len(targets) / len(seen))
        return (np.mean(scores), np.mean(chances)) if scores else (math.nan, math.nan)

    def broad(self, weights):
        found = []
        for i in range(self.length):
            seen = self.seen[i].sum()
            if self.pieces[i] is not None and seen > FEW:
                w = weights[i][weights[i] > 0]
                found.append(-(w * np.log(w)).sum() / math.log(seen))
        return np.mean(found)


MASKS = {"sees all": None, "causal": Causal(), "a window": Causal() & Window(11, 0)}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("special", [True, False])
def test_scores_are_the_definitions_on_any_weights(kind, special):
    heads = [randomly(seed) for seed in range(3)]
    model = PretendModel([heads, heads[:2]], special=special, causal=kind != "sees all", mask=MASKS[kind])
    tokens, found = measured(model)
    length = len(tokens.ids)
    seen = None if MASKS[kind] is None else MASKS[kind].dense(length, length)[0, 0].numpy()
    oracle = Oracle(model, TEXT, seen)
    for layer in range(2):
        for number in range(model.heads[layer]):
            weights = heads[number](tokens.ids).double().numpy() * oracle.seen
            weights /= weights.sum(-1, keepdims=True)
            for name in NAMES:
                score, chance = oracle.score(name, weights)
                # float32 on its way through statistics: 1e-6 of sums of 60 weights.
                assert found.scores[name][layer, number] == pytest.approx(score, abs=1e-5, nan_ok=True), name
                assert found.chance[name][layer, number] == pytest.approx(chance, abs=1e-5, nan_ok=True), name
            assert found.scores["broad"][layer, number] == pytest.approx(oracle.broad(weights), abs=1e-5)
    assert all(math.isnan(found.scores[name][1, 2]) for name in SCORES)  # no such head


@pytest.mark.parametrize("causal", [True, False])
def test_heads_with_a_habit_score_one_for_it(causal):
    habits = {
        "previous": previous,
        "self": itself,
        "first": first,
        "repeat induction": inducing,
        "repeat duplicate": duplicating,
    }
    model = PretendModel([list(habits.values())], causal=causal)
    _, found = measured(model)
    for head, name in enumerate(habits):
        assert found.scores[name][0, head] == pytest.approx(1, abs=1e-6)
        for other in set(habits) - {name}:
            assert found.scores[other][0, head] < 0.7  # copying heads rest on the first token


def test_looking_ahead_and_at_the_end():
    _, found = measured(PretendModel([[following, last]]))
    assert found.scores["next"][0, 0] == pytest.approx(1)
    assert found.scores["delimiter"][0, 1] == pytest.approx(1)  # [SEP]
    assert found.scores["first"][0, 1] == pytest.approx(0)


def test_induction_and_duplicate_count_every_earlier_occurrence():
    # "a b a c a": the last "a" sees two earlier ones, after which "b" and "c" stood.
    words = "x1 x2 x3 x4 x5 x6 x7 x8 x9 a b a c a".split()

    def head(ids):
        weights = torch.zeros(len(ids), len(ids))
        weights[:, 0] = 1
        if len(ids) != len(words):  # the repeats
            return weights
        weights[11] = weights[13] = 0
        weights[11, 10] = 1  # the second "a" looks at "b"
        weights[13, 10], weights[13, 12], weights[13, 9], weights[13, 0] = 0.25, 0.5, 0.125, 0.125
        return weights

    _, found = measured(PretendModel([[head]], special=False), " ".join(words))
    assert found.scores["induction"][0, 0] == pytest.approx((1 + 0.75) / 2)
    assert found.scores["duplicate"][0, 0] == pytest.approx((0 + 0.125) / 2)
    assert found.chance["induction"][0, 0] == pytest.approx((1 / 14 + 2 / 14) / 2)


def test_a_token_is_not_its_own_earlier_follower():
    words = [f"w{k}" for k in range(11)] + ["ha", "ha", "ha"]
    _, found = measured(PretendModel([[itself, previous]]), " ".join(words))
    # Only the third "ha" sees a follower: the second one, which stood after the first.
    assert found.scores["induction"][0].tolist() == pytest.approx([0, 1])
    assert found.chance["induction"][0, 0] == pytest.approx(1 / 16)


def test_a_head_that_looks_everywhere_alike_scores_chance():
    for causal in (True, False):
        _, found = measured(PretendModel([[evenly, previous]], causal=causal))
        for name in (*NAMES, *ON_REPEATS):
            score, chance = found.scores[name][0, 0], found.chance[name][0, 0]
            assert score == pytest.approx(chance, abs=1e-6, nan_ok=True), name
        assert found.scores["broad"][0, 0] == pytest.approx(1)
        assert found.scores["broad"][0, 1] == pytest.approx(0, abs=1e-6)


def test_what_cannot_be_seen_is_not_scored():
    _, found = measured(PretendModel([[evenly]], causal=True))
    assert math.isnan(found.scores["next"][0, 0])  # nobody looks ahead
    _, found = measured(PretendModel([[evenly]], special=False), "one two three four five six seven eight nine ten")
    for name in ("delimiter", "punctuation", "induction", "duplicate"):
        assert math.isnan(found.scores[name][0, 0]), name


def test_repeats_need_enough_different_words():
    words = "one two three four five six seven".split() * 3
    _, found = measured(PretendModel([[inducing]]), " ".join(words))
    assert math.isnan(found.scores["repeat induction"][0, 0])
    assert found.scores["induction"][0, 0] == pytest.approx(1)
    _, found = measured(PretendModel([[inducing]]), " ".join([*words, "eight"]))
    assert found.scores["repeat induction"][0, 0] == pytest.approx(1)


def test_repeats_fit_the_model():
    model = PretendModel([[inducing]], context=2 + 2 * 9)
    _, found = measured(model, "one two three four five six seven eight nine ten eleven twelve")
    assert found.scores["repeat induction"][0, 0] == pytest.approx(1)


def test_a_head_is_dormant_where_its_output_is_small_beside_the_others():
    small = DORMANT * 0.9

    def values(layer, length):
        made = torch.ones(1, 3, length, 3, dtype=torch.float64)
        made[:, 0] *= small / (3 - small) * 2  # norms a, c, c with a = DORMANT * 0.9 of their mean
        return made

    _, found = measured(PretendModel([[evenly, previous, first]], values=values))
    assert found.scores["dormant"].tolist() == [[1, 0, 0]]
    _, found = measured(PretendModel([[evenly]]))
    assert np.isnan(found.scores["dormant"]).all()  # alone in its layer


def test_a_head_that_rests_on_a_key_without_a_value_is_dormant_there():
    def values(layer, length):
        made = torch.ones(1, 2, length, 3, dtype=torch.float64)
        made[:, :, 0] = 0
        return made

    tokens, found = measured(PretendModel([[first, itself]], values=values))
    assert found.scores["first"][0, 0] == pytest.approx(1)
    assert found.scores["dormant"].tolist() == [[1, 0]]
    assert tokens.is_text.sum() > 0


def test_which_tokens_are_what():
    tokens = mark(PretendModel([[evenly]]), "One, two\nthree")
    assert tokens.is_text.tolist() == [False, True, True, True, True, True, False]
    assert tokens.ordinary.tolist() == [False, True, False, True, False, True, False]
    assert tokens.groups["delimiter"].tolist() == [False, False, False, False, True, False, True]
    assert tokens.groups["punctuation"].tolist() == [False, False, True, False, False, False, False]
    bare = mark(PretendModel([[evenly]], special=False), "\nOne")
    assert bare.groups["delimiter"].tolist() == [True, False]  # nothing of its own stands before


def test_the_same_seed_draws_the_same_repeats():
    model = PretendModel([[randomly(1)]])
    scores = [measured(model, seed=seed)[1].scores["repeat induction"][0, 0] for seed in (0, 0, 1)]
    assert scores[0] == scores[1]
    assert len(set(scores)) <= 2
