"""Medians of paired ratios, and exponents."""

from __future__ import annotations

import math

import pytest

from looped import looped
from saccade.benchmark.attention import exponent, paired_ratio, quartiles


def test_quartiles():
    found = quartiles([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == (2.0, 3.0, 4.0)
    assert found.spread == pytest.approx(2 / 3)


def test_ratios_are_of_readings_of_one_round():
    # The machine slowed down by ten in the middle: medians apart would say 10 / 2, pairs say 2.
    ours, theirs = [1.0, 10.0, 1.0, 10.0, 10.0], [2.0, 20.0, 2.0, 20.0, 20.0]
    assert paired_ratio(theirs, ours).median == 2.0
    with pytest.raises(ValueError, match="expected as many readings above as below, got 2 and 1"):
        paired_ratio([1.0, 2.0], [1.0])


@looped("power", [0.0, 1.0, 1.5, 2.0])
def test_an_exact_power_is_found(power):
    lengths = [100, 300, 1000, 7000]
    assert exponent(lengths, [3.7 * length**power for length in lengths]) == pytest.approx(power, abs=1e-12)


def test_a_fit_is_least_squares_in_logarithms():
    assert exponent([1, 2, 4], [1, 8, 16]) == pytest.approx(math.log2(16) / 2)


@looped(("lengths", "amounts"), [([5], [1.0]), ([5, 5], [1.0, 2.0]), ([], []), ([1, 2], [1.0])])
def test_an_exponent_needs_two_lengths(lengths, amounts):
    with pytest.raises(ValueError, match="amounts at two lengths or more"):
        exponent(lengths, amounts)


def test_logarithms_need_what_is_positive():
    with pytest.raises(ValueError, match="positive lengths and amounts"):
        exponent([1, 2], [0.0, 1.0])


def test_no_readings_have_no_quartiles():
    with pytest.raises(ValueError, match="quartiles of no readings"):
        quartiles([])
