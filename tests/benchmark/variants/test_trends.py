"""Exponents and crossings of numbers whose exponents and crossings are known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from comparisons import exact, line, point
from saccade.benchmark.variants import ContenderResults
from saccade.benchmark.variants.trends import FORESEEN, Crossover, crossover, growth

LENGTHS = (256, 512, 1024, 2048)


def power(factor, exponent, lengths=LENGTHS):
    return {length: factor * length**exponent for length in lengths}


def test_exponents_of_time_and_memory():
    points = tuple(point(n, 3e-9 * n**2, forward=5e-6 * n, memory=7 * n**3) for n in LENGTHS)
    made = ContenderResults("a", "reading", "other", "", points=points)
    assert growth(made, "training") == pytest.approx(2)
    assert growth(made, "forward") == pytest.approx(1)
    assert growth(made, "memory") == pytest.approx(3, rel=1e-3)  # bytes are whole
    assert growth(made, "decode") is None


def test_short_calls_do_not_count():
    """At 16 and 32 all is overhead; the longest is 1024, so 128 and more are fitted."""
    seconds = {16: 1.0, 32: 1.0, **power(1e-6, 2, (128, 512, 1024))}
    assert growth(line("a", seconds), "training") == pytest.approx(2)


def test_two_lengths_fit_anything():
    assert growth(line("a", power(1, 1, (512, 1024))), "training") is None


@given(st.floats(1.05, 8.0), st.floats(0.2, 1.9))
def test_a_crossing_of_powers_is_found_exactly(octave, exponent):
    """c L^p meets L^2 where c = L^(2 - p): a straight line in logarithms, so interpolation is exact."""
    where = 256 * 2 ** (octave * 3 / 8)
    found = crossover(line("a", power(where ** (2 - exponent), exponent)), exact(power(1, 2)), "training")
    assert found.kind == "measured"
    assert found.length == pytest.approx(where)


def test_a_crossing_beyond_is_marked():
    found = crossover(line("a", power(6000.0, 1)), exact(power(1, 2)), "training")
    assert found.kind == "extrapolated"
    assert found.length == pytest.approx(6000)


def test_a_crossing_too_far_beyond_is_none():
    near, far = FORESEEN * 2048 * 0.99, FORESEEN * 2048 * 1.01
    assert crossover(line("a", power(near, 1)), exact(power(1, 2)), "training").kind == "extrapolated"
    assert crossover(line("a", power(far, 1)), exact(power(1, 2)), "training") == Crossover("never")


def test_always_never_until_unknown():
    base = exact(power(1, 1))
    assert crossover(line("a", power(0.5, 1)), base, "training") == Crossover("always")
    assert crossover(line("a", power(2, 1)), base, "training") == Crossover("never")
    assert crossover(line("a", power(2, 1.5)), base, "training") == Crossover("never")
    found = crossover(line("a", power(1 / 1000, 2)), base, "training")
    assert found.kind == "until"
    assert found.length == pytest.approx(1000)
    assert crossover(line("a", {}), base, "training") == Crossover("unknown")
    assert crossover(line("a", {300: 1.0}), base, "training") == Crossover("unknown")  # no length in common


def test_the_last_crossing_counts():
    """Faster, slower, faster for good: from the last change on."""
    base = exact({256: 1.0, 512: 1.0, 1024: 1.0, 2048: 1.0})
    found = crossover(line("a", {256: 0.5, 512: 2.0, 1024: 2.0, 2048: 0.5}), base, "training")
    assert found.kind == "measured"
    assert found.length == pytest.approx(1024 * math.sqrt(2))
