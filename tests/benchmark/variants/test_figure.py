"""The figure: drawn alike from alike, names that do not lie upon each other, and every line in it."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, strategies as st

from comparisons import comparison, exact, full, line
from saccade.benchmark.variants import ContenderResults, GradientReach, VariantComparison
from saccade.benchmark.variants.figure import apart, draw, family


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_it_is_drawn_again_as_it_was(kind, start):
    made = full()
    first = draw(made, kind)
    assert first.startswith(start)
    assert draw(VariantComparison.from_json(made.as_json()), kind) == first


@pytest.mark.slow
def test_every_name_is_in_it(monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    made = full()
    made.paths += [GradientReach("late", 4, (1, 2, 4), (1.0, 1e-2, 1e-9))]
    told = " ".join(re.findall(r"<text[^>]*>([^<]*)", draw(made, "svg").decode()))
    for name in ("exact", "some", "other", "GRU", "attention layer", "late x4", "beads; causal", "layer"):
        assert name in told


def test_what_was_not_measured_is_not_drawn():
    with pytest.raises(ValueError, match="a plot needs measurements, and this comparison has none"):
        draw(comparison(), "png")


@pytest.mark.slow
def test_without_errors_or_paths_or_layers_it_is_drawn():
    assert draw(comparison(line("a", {512: 1.0, 1024: 2.0}, error=None)), "png")
    assert draw(comparison(exact({512: 1.0})), "png")


def test_families():
    assert family(exact({1: 1.0})) == "exact attention"
    assert family(line("a", {}, computes="softmax")) == "exact on some keys"
    assert family(line("a", {})) == "approximation"
    assert family(line("a", {}, computes="other")) == "something else"
    assert family(ContenderResults("a", "layer", "softmax", "", whole=True)) == "layer"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 9)), max_size=11))
def test_names_are_moved_apart_and_stay_inside(wanted):
    wanted.sort()
    sizes = [size for _, size in wanted]
    centres = apart([centre for centre, _ in wanted], sizes, 0.0, 100.0)
    edges = [(centre - size / 2, centre + size / 2) for centre, size in zip(centres, sizes, strict=True)]
    assert all(below[1] <= above[0] + 1e-6 for below, above in itertools.pairwise(edges))
    assert all(low >= -1e-6 and high <= 100 + 1e-6 for low, high in edges)


def test_names_that_have_room_stay_where_they_are():
    assert apart([10.0, 50.0, 90.0], [5.0, 5.0, 5.0], 0.0, 100.0) == [10.0, 50.0, 90.0]


def test_too_many_names_are_squeezed():
    assert apart([0.0, 0.0], [100.0, 100.0], 0.0, 100.0) == [25.0, 75.0]
