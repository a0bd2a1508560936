"""Differences between checkpoints: paired over texts, certain only where they stand out of all of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from pretend import PretendModel, evenly, itself, previous, randomly
from scipy import stats

from saccade.analysis import SCORES, Text, compare, study_corpus

DRAW = np.random.default_rng(0)
TEXTS = [Text(f"t{k}", " ".join(DRAW.choice("a bb ccc dd e ff g hh i jj".split(), 30))) for k in range(5)]


def study(*layers, texts=TEXTS, **more):
    return study_corpus(PretendModel(list(layers), **more), texts)


def with_scores(study, name, values):
    return dataclasses.replace(study, scores={**study.scores, name: np.asarray(values, float)})


def test_the_head_that_changed_is_named_first():
    before = study([randomly(1), previous], [randomly(2), randomly(3)])
    after = study([randomly(1), previous], [randomly(2), itself])
    changes = compare(before, after).changes()
    top = changes[0]
    assert (top.layer, top.head, top.score) == (1, 1, "self")
    assert top.after == pytest.approx(1) and top.difference == pytest.approx(1 - top.before)
    assert all(c.difference == 0 and not c.certain for c in changes if (c.layer, c.head) != (1, 1))
    assert [abs(c.difference) for c in changes] == sorted((abs(c.difference) for c in changes), reverse=True)


def test_differences_are_paired_over_texts():
    before = study([randomly(1), previous])
    # What texts do to both is large, what the checkpoints differ by is small and the same on all: certain.
    base = np.array([0.1, 0.3, 0.5, 0.7, 0.2])[:, None, None] * np.ones((5, 1, 2))
    step = np.array([0.021, 0.020, 0.019, 0.020, 0.0205])[:, None, None]
    found = compare(with_scores(before, "self", base), with_scores(before, "self", base + step))
    change = found.changes()[0]
    low, high = stats.t.interval(0.95, 4, step.mean(), stats.sem(step[:, 0, 0]))
    assert change.difference == pytest.approx(step.mean())
    assert 2 * change.half_width == pytest.approx(high - low, rel=1e-5)
    assert change.certain


def test_a_change_is_certain_only_among_all_comparisons():
    before = study([randomly(1), previous])
    known = sum(int(np.isfinite(before.mean(name)).sum()) for name in SCORES)
    difference = np.array([0.9, 1.0, 1.1, 1.0, 1.0])
    sem = stats.sem(difference)
    # Just inside of the 95 % interval of one comparison, and of all at once.
    for level, certain in ((0.95, False), (1 - 0.05 / known, True)):
        shift = 1.001 * sem * stats.t.ppf((1 + level) / 2, 4)
        values = (difference - 1 + shift)[:, None, None] * np.ones((5, 1, 2))
        change = compare(with_scores(before, "self", 0 * values), with_scores(before, "self", values)).changes()[0]
        assert change.score == "self" and abs(change.difference) > change.half_width
        assert change.certain is certain


def test_other_shapes_are_compared_by_thirds():
    before = study([evenly], [evenly], [evenly])
    after = study([itself, itself], [itself, evenly], [evenly, evenly], [evenly, evenly], [evenly, evenly], [itself])
    found = compare(before, after)
    assert not found.by_head
    difference, wide = found.thirds("self")
    chance = before.by_chance("self")[0, 0]
    assert difference == pytest.approx([0.75 * (1 - chance), 0, (1 - chance) / 3], abs=1e-6)
    assert wide == pytest.approx([0, 0, 0], abs=1e-5) or np.isfinite(wide).all()
    with pytest.raises(ValueError, match=r"one by one between 3 layers x 1 heads and 6 layers x 1 to 2 heads; thirds"):
        found.changes()


def test_texts_that_one_model_leaves_out_are_left_out_of_both():
    short = Text("short", "a bb ccc dd e ff g hh")  # 8 words, 16 pieces
    texts = [TEXTS[0], short, TEXTS[1]]
    before, after = study([previous], texts=texts), study([previous], texts=texts, pieces=1)
    assert before.texts == ("t0", "t1") and after.texts == ("t0", "t1")  # 13 letters are too few as well
    longer = [TEXTS[0], Text("longer", "aaaaaaaaaa bbbbbbbb"), TEXTS[1]]
    before, after = study([previous], texts=longer), study([previous], texts=longer, pieces=1)
    assert after.texts == ("t0", "longer", "t1")
    found = compare(before, after)
    assert found.before.texts == found.after.texts == ("t0", "t1")
    assert found.after.skipped == ("longer",)
    assert found.differences("previous").shape == (2, 1, 1)
    with pytest.raises(ValueError, match="pretend and pretend were studied on different texts; none is shared"):
        compare(study([previous], texts=TEXTS[:1]), study([previous], texts=TEXTS[1:2]))


def test_one_text_gives_no_interval():
    change = compare(study([previous], texts=TEXTS[:1]), study([itself], texts=TEXTS[:1])).changes()[0]
    assert abs(change.difference) > 0.5 and math.isnan(change.half_width) and not change.certain
