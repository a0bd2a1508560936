"""Intervals against scipy's, and against what is known of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from saccade.support._uncertainty import half_width, over_groups, student, wilson


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 63, 501])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999, 1 - 0.05 / 3000])
def test_student(freedom, level):
    assert student(freedom, level) == pytest.approx(stats.t.ppf((1 + level) / 2, freedom), rel=2e-6)


@pytest.mark.parametrize(("right", "count"), [(0, 1), (1, 1), (0, 17), (17, 17), (3, 11), (500, 1003)])
def test_wilson(right, count):
    expected = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_is_known_of_nothing():
    assert all(map(math.isnan, wilson(0, 0)))
    assert all(map(math.isnan, over_groups(np.array([1.0]), np.array([3]), seed=0)))
    assert np.isnan(half_width(np.array([np.nan, 0.0]), np.array([1, 0]))).all()


def test_half_width_of_a_mean():
    draw = np.random.default_rng(0).normal(size=11)
    low, high = stats.t.interval(0.95, 10, draw.mean(), stats.sem(draw))
    found = half_width(np.array(draw.std(ddof=1)), np.array(11))
    assert 2 * float(found) == pytest.approx(high - low, rel=1e-5)


def test_half_width_by_how_many_texts_there_are():
    found = half_width(np.ones((2, 3)), np.array([[2, 3, 5], [1, 7, 2]]))
    assert math.isnan(found[1, 0])
    assert found[0, 0] == pytest.approx(found[1, 2]) == pytest.approx(stats.t.ppf(0.975, 1) / math.sqrt(2), rel=1e-6)
    assert found[0, 1] == pytest.approx(stats.t.ppf(0.975, 2) / math.sqrt(3), rel=1e-6)


def test_over_groups_is_as_wide_as_the_groups_differ():
    # 400 sentences of 5 words; words of a sentence are all right or all wrong, so 400 cases and not 2000.
    right = 5.0 * (np.arange(400) % 4 > 0)
    low, high = over_groups(right, np.full(400, 5), seed=1)
    expected = 1.96 * math.sqrt(0.75 * 0.25 / 400)
    # 2000 draws know a quantile to about 5 % of the width; an interval of 90 % would be 16 % narrower.
    assert low == pytest.approx(0.75 - expected, abs=0.1 * expected)
    assert high == pytest.approx(0.75 + expected, abs=0.1 * expected)
    assert over_groups(right, np.full(400, 5), seed=1) == (low, high)


def test_over_groups_weighs_long_groups_more():
    low, high = over_groups(np.array([9.0, 0.0]), np.array([9, 1]), seed=0)
    assert (low, high) == (0.0, 1.0)
