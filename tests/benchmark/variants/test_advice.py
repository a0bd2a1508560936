"""The advice agrees with its own table, whatever stands there."""

from __future__ import annotations

import math
import re

import numpy as np
from hypothesis import given, strategies as st

from comparisons import comparison, exact, line
from looped import looped
from saccade.benchmark.variants.advice import FASTER, about, advice, choose
from saccade.benchmark.variants.trends import FLATTEST, OFF, STEEPEST, crossover
from saccade.support import _numbers

EXACT = {512: 1.0, 1024: 4.0, 2048: 16.0}


def test_stay_where_nothing_is_faster():
    made = comparison(exact(EXACT), line("slow", {512: 2.0, 1024: 4.0, 2048: 14.0}, error=0.01))
    assert advice(made) == (
        "Stay with exact attention: up to 2k tokens no mechanism on the same q, k and v trains 1.2 times as fast."
    )


def test_take_what_is_close():
    made = comparison(exact(EXACT), line("near", {512: 2.0, 1024: 4.0, 2048: 8.0}, error=0.034))
    assert advice(made) == (
        "Use near from about 1,000 tokens on: at 2k tokens it trains 2.0 times as fast as exact attention, with an "
        "error of 3.4 % over all rows and 6.8 % in the worst, at 512; no mechanism is faster."
    )


def test_what_is_faster_and_far_off_is_for_models_trained_with_it():
    near = line("near", {512: 0.5, 1024: 2.0, 2048: 8.0}, error=0.1)
    far = line("far", {512: 1.0, 1024: 2.0, 2048: 4.0}, error=0.9, computes="other")
    assert advice(comparison(exact(EXACT), near, far)) == (
        "Use near: at 2k tokens it trains 2.0 times as fast as exact attention, with an error of 10 % over all rows "
        "and 20 % in the worst, at 512; for a model that is trained with it, the fastest is far, 4.0 times as fast at "
        "2k tokens, with an error of 90 % over all rows and 180 % in the worst, at 512."
    )


def test_stay_where_nothing_is_close():
    far = line("far", {512: 1.0, 1024: 2.0, 2048: 4.0}, error=0.9)
    less = line("less", {512: 1.0, 1024: 2.0, 2048: 5.0}, error=0.5)
    assert advice(comparison(exact(EXACT), far, less)) == (
        "Stay with exact attention for these q, k and v: no faster mechanism is close to it (an error of 50 % or "
        "more); for a model that is trained with it, the fastest is far, 4.0 times as fast at 2k tokens, with an error "
        "of 90 % over all rows and 180 % in the worst, at 512."
    )


def test_an_error_that_nobody_knows_is_not_small():
    made = comparison(exact(EXACT), line("dark", {2048: 1.0}))
    assert choose(made, 0.1).close is None
    assert advice(made).endswith("16.0 times as fast at 2k tokens, with an unknown error.")


def test_the_error_counts_at_the_longest_length_that_has_one():
    changing = line("a", {512: 1.0, 1024: 1.0, 2048: 1.0}, error=0.01)
    short = line("b", {256: 1.0, 2048: 2.0}, error=0.001, known=256)
    choice = choose(comparison(exact(EXACT), changing, short), 0.1)
    assert choice.error_length == 512
    assert choice.close.name == "a"
    assert choice.error(short) is None


def test_without_exact_attention_there_is_no_advice():
    assert advice(comparison(line("a", EXACT))).startswith("No advice: exact attention was not timed")
    assert advice(comparison(exact({}), line("a", EXACT))).startswith("No advice")


def test_layers_are_not_advised():
    made = comparison(exact(EXACT), line("GRU", {2048: 0.001}, kind="layer", error=0.0))
    assert advice(made).startswith("Stay")


def test_the_tolerance_is_the_comparison_s():
    made = comparison(exact(EXACT), line("near", {2048: 1.0}, error=0.2, known=2048), tolerance=0.3)
    assert advice(made).startswith("Use near")
    assert advice(made, 0.1).startswith("Stay")


LENGTHS = (512, 1024, 2048)


def fitted(times):
    """The power of the length that fits best, and how many times the numbers lie off it."""
    x, y = np.log(LENGTHS), np.log(times)
    power, start = np.polyfit(x, y, 1)
    return power, math.exp(math.sqrt(np.mean((y - power * x - start) ** 2)))


def makes_sense(times):
    power, off = fitted(times)
    return FLATTEST <= power <= STEEPEST and off <= OFF


def grown(drawn):
    """Seconds that grow, each a little off."""
    factor, power, off = drawn
    return [factor * (length / 512) ** power * one for length, one in zip(LENGTHS, off, strict=True)]


growing = st.tuples(
    st.floats(1e-4, 1.0), st.floats(0.3, 2.5), st.lists(st.floats(0.85, 1.2), min_size=3, max_size=3)
).map(grown)
anything = st.lists(st.floats(1e-4, 1e2), min_size=3, max_size=3)
error = st.one_of(st.none(), st.floats(0.0, 3.0))


@looped("times", [[4.0, 2.0, 1.0], [1.0, 0.9, 0.8], [1.0, 9.0, 1.0], [1e-3, 1.0, 1e3]])
@looped("who", ["exact", "near", "far"])
def test_times_that_make_no_sense_give_no_advice(times, who):
    """Whoever the advice would name; a machine that was busy told nothing of any."""
    assert not makes_sense(times)
    near, far = {512: 0.5, 1024: 1.0, 2048: 2.0}, {512: 0.1, 1024: 0.2, 2048: 0.4}
    given = {"exact": EXACT, "near": near, "far": far}
    given[who] = dict(zip(LENGTHS, [given[who][2048] / times[-1] * one for one in times], strict=True))
    made = comparison(
        exact(given["exact"]),
        line("near", given["near"], error=0.01),
        line("far", given["far"], error=0.9),
    )
    assert advice(made).startswith(f"No advice: the times of {who} are not plausible")


def test_others_that_make_no_sense_do_not_silence_it():
    falls = line("falls", {512: 99.0, 1024: 90.0, 2048: 15.9}, error=0.01)
    near = line("near", {512: 0.5, 1024: 1.0, 2048: 2.0}, error=0.01)
    assert advice(comparison(exact(EXACT), near, falls)).startswith("Use near")


@given(anything, st.lists(st.tuples(anything, error), max_size=3))
def test_nothing_senseless_is_ever_advised(base, others):
    given_times = {"exact": base, **{f"m{n}": times for n, (times, _) in enumerate(others)}}
    lines = [
        line(f"m{n}", dict(zip(LENGTHS, times, strict=True)), error=error, known=1024)
        for n, (times, error) in enumerate(others)
    ]
    told = advice(comparison(exact(dict(zip(LENGTHS, base, strict=True)), known=1024), *lines))
    if told.startswith("No advice"):
        blamed = re.search("times of (.*) are not plausible", told)[1].split(" and ")
        assert blamed and not any(makes_sense(given_times[name]) for name in blamed)
    else:
        assert all(makes_sense(given_times[name]) for name in {"exact", *re.findall(r"\bm\d\b", told)})


@given(growing, st.lists(st.tuples(growing, error), max_size=5), st.floats(0.01, 1.0))
def test_it_agrees_with_its_table(base, others, tolerance):
    lengths = LENGTHS
    lines = [
        line(f"m{n}", dict(zip(lengths, times, strict=True)), error=error, known=1024)
        for n, (times, error) in enumerate(others)
    ]
    made = comparison(exact(dict(zip(lengths, base, strict=True)), known=1024), *lines, tolerance=tolerance)
    told = advice(made)
    ratio = {one.name: base[-1] / one.at(2048).seconds("training") for one in lines}
    error = {one.name: None if one.at(1024).error is None else one.at(1024).error.whole for one in lines}
    worth = {name for name in ratio if ratio[name] >= FASTER}
    close = {name for name in worth if error[name] is not None and error[name] <= tolerance}
    assert told.count(". ") == 0  # one sentence
    assert told.endswith(".")
    taken = re.match(r"Use (m\d)", told)
    assert (taken is None) == (not close)
    if taken:
        name = taken[1]
        assert name in close
        assert ratio[name] == max(ratio[other] for other in close)
        assert f"{ratio[name]:.1f} times as fast as exact attention" in told
        worst = _numbers.percent(2 * error[name])  # as `line` makes them
        assert f"an error of {_numbers.percent(error[name])} over all rows and {worst} in the worst, at 1k" in told
        found = crossover(lines[int(name[1:])], made.lines[0], "training")
        assert ("tokens on:" in told) == (found.kind == "measured")
        if found.kind == "measured":
            assert f"from about {about(found.length)} tokens on" in told
    fastest = re.search(r"the fastest is (m\d), ([\d.]+) times", told)
    if fastest:
        assert ratio[fastest[1]] == max(ratio.values())
        assert fastest[2] == f"{ratio[fastest[1]]:.1f}"
    elif taken:
        assert ratio[taken[1]] == max(ratio.values())
    else:
        assert not worth


@looped(("length", "told"), [(1234.0, "1,200"), (999.0, "1,000"), (65.4, "65"), (123456.0, "120,000")])
def test_about(length, told):
    assert about(length) == told
