"""Comparisons go to JSON and come back, and medians and reaches are those of the numbers."""

from __future__ import annotations

import json
import math

import pytest

from comparisons import full, line
from looped import looped
from saccade.benchmark.variants import (
    ApproximationError,
    ContenderResults,
    GradientReach,
    LengthResult,
    VariantComparison,
)


def test_json_holds_everything():
    made = full()
    read = VariantComparison.from_json(made.as_json())
    assert read == made
    assert read.as_json() == made.as_json()


def test_an_infinite_error_comes_back():
    made = full()
    made.lines = [
        ContenderResults(
            "lost", "reading", "other", "", points=(LengthResult(8, error=ApproximationError(math.inf, math.nan)),)
        )
    ]
    text = made.as_json()
    assert "Infinity" not in text
    assert "NaN" not in text
    assert VariantComparison.from_json(text).lines[0].points[0].error == ApproximationError(math.inf, math.inf)


WRONG_LINES = '{"machine": {}, "settings": {}, "data": {}, "lines": [1], "paths": []}'


@looped("text", ["[]", "{}", '{"groups": []}', WRONG_LINES])
def test_another_json_is_refused(text):
    with pytest.raises(ValueError, match="not a comparison of mechanisms"):
        VariantComparison.from_json(text)


def test_what_is_no_json_is_refused():
    with pytest.raises(ValueError):
        VariantComparison.from_json("beads")


def test_numbers_have_six_digits():
    made = full()
    made.lines = [line("a", {3: 1 / 3})]
    written = json.loads(made.as_json())["lines"][0]["points"][0]["readings"]["training"]
    assert written == [0.333333, 0.333333, 0.333333]


def test_medians():
    one = LengthResult(5, {"forward": (3.0, 1.0, 2.0)})
    assert one.seconds("forward") == 2.0
    assert one.seconds("decode") is None


def test_amounts_are_those_that_were_measured():
    made = ContenderResults(
        "a",
        "reading",
        "other",
        "",
        points=(LengthResult(2, {"forward": (1.0,)}, memory=0), LengthResult(3), LengthResult(5, memory=7)),
    )
    assert made.amounts("forward") == ([2], [1.0])
    assert made.amounts("memory") == ([5], [7.0])
    assert made.at(3) == LengthResult(3)
    assert made.at(4) is None


def test_lines_of_a_kind_were_measured():
    made = full()
    assert [one.name for one in made.of("reading")] == ["exact", "some", "other"]
    assert made.exact("reading").name == "exact"
    assert made.exact("layer").name == "attention"
    assert made.lengths == [512, 1024]


def test_reach():
    path = GradientReach("a", 1, (1, 2, 4, 8), (1.0, 0.2, 0.009, 0.02))
    assert path.reach() == 8
    assert path.reach(0.1) == 2
    assert GradientReach("b", 1, (), ()).reach() == 0
