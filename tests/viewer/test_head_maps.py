"""Maps of layers x heads: what a cell shows, how wide maps wrap, and where colours have their zero."""

from __future__ import annotations

import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from saccade.attribution import CallHeads, HeadImportance, HeadValues, Patching
from saccade.viewer.heads import _figure, _terminal, importance_sentences, patching_sentences

CALLS = (CallHeads("a", 0, 3), CallHeads("b", 1, 2))
VALUES = torch.tensor([0.5, -0.25, 0.0004, -1.0, math.nan], dtype=torch.float64)


def printed(found, width):
    console = Console(file=io.StringIO(), width=width, highlight=False, no_color=True)
    _terminal.print_map(console, found, "title", "")
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_cells_have_signs_and_what_is_missing_is_empty():
    lines = printed(HeadValues(CALLS, VALUES), 80)
    assert lines[1].split() == "layer head 0 head 1 head 2".split()
    assert [line.split() for line in lines[2:]] == [
        ["0", "+.50", "-.25", "·"],
        ["1", "-1.00"],
        "· is 0, to within .005".split(),
    ]
    small = printed(HeadValues(CALLS, VALUES / 1000), 80)
    assert small[3].split() == ["1", "-.00100"]
    assert len(printed(HeadValues(CALLS[:1], VALUES[:2].repeat(2)[:3]), 80)) == 3  # no dot, no legend


def test_a_narrow_terminal_has_blocks_of_heads():
    calls = (CallHeads("a", 0, 11), CallHeads("b", 1, 11))
    values = torch.arange(1, 23, dtype=torch.float64) / 100
    lines = printed(HeadValues(calls, values), 34)
    assert max(map(len, lines)) <= 34
    shown = [float(cell) for line in lines[1:] if line[:1].isdigit() for cell in line.split()[1:]]
    assert sorted(shown) == pytest.approx(values.tolist())


def test_calls_of_one_layer_are_told_by_their_names():
    calls = (CallHeads("self", 0, 1), CallHeads("cross", 0, 1))
    assert [line.split()[0] for line in printed(HeadValues(calls, torch.tensor([1.0, 2.0])), 60)[2:]] == [
        "self",
        "cross",
    ]


def test_the_rise_of_a_gradient_is_its_opposite_and_what_harms_by_chance_is_not_accused():
    size, signed = (HeadValues(CALLS[:1], values) for values in (VALUES[:3].abs(), VALUES[:3]))
    found = HeadImportance("gradient", size, None, None, 3.0, 1, signed=signed)
    first = "Head 0.1 matters most: without it the loss would rise by 0.250 nats (first-order estimate"
    assert importance_sentences(found) == [
        f"{first}).",
        "For 2 of the 3 heads the loss would fall without the head; how certain that is, a longer text shows.",
        "Hardly any effect: 0.2 (-0.000).",
    ]
    half = torch.tensor([0.3, 0.375, 0.1])
    ends = {
        f"signed_{name}": HeadValues(CALLS[:1], VALUES[:3] + half * sign) for name, sign in (("low", -1), ("high", 1))
    }
    assert importance_sentences(dataclasses.replace(found, **ends))[:3] == [
        f"{first}, 95 % interval -0.125 to +0.625).",
        "For 1 of the 3 heads the loss would fall without the head, most without 0.0 (-0.500); chance alone gives "
        "about 0.",
        "For 2 of the 3 heads this text does not show whether they help or harm: the 95 % interval includes 0. A "
        "longer text narrows it.",
    ]


def test_heads_that_restore_and_heads_that_oppose_are_two_lists():
    """By size alone the head that moves furthest away comes first, as the one that restores most."""
    found = Patching(HeadValues(CALLS, VALUES), None, clean=1.0, corrupted=-1.0, what="output", direction="denoising")
    assert patching_sentences(found) == [
        "Head 0.0 restores most: with its output from the clean run, the corrupted run's metric goes from -1.00 to "
        "+0.00, 50 % of the way to the clean run's.",
        "Next are 0.2 (0.0 %).",
        "2 heads oppose (move the metric away from the clean run's), most 1.0 (-100 %) and 0.1 (-25 %).",
    ]
    assert str(found).splitlines()[-2:] == ["towards: 0.0 0.5, 0.2 4e-04", "away: 1.0 -1, 0.1 -0.25"]
    less = dataclasses.replace(found, exact=HeadValues(CALLS, -VALUES.abs()))
    assert patching_sentences(less)[0] == "No head restores any of the metric."


def test_white_is_zero_and_each_number_can_be_read_on_its_colour():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.add_subplot()
    values = np.array([[0.9, -0.1, 0.3], [np.nan, 0.0, -0.2]])
    _figure._paint(axes, _figure._panel("title", values, ["0", "1"]))
    (image,) = axes.images
    assert (image.norm.vmin, image.norm.vmax) == (-0.9, 0.9)
    assert image.cmap(image.norm(0.0))[:3] == pytest.approx((1, 1, 1), abs=0.01)
    shown = {text.get_position(): (text.get_text(), text.get_color()) for text in axes.texts}
    assert shown[0, 0] == ("+.900", "white") and shown[1, 0] == ("-.100", _figure.INK)
    assert shown[0, 1][0] == "" and shown[1, 1][0] == "·" and len(shown) == 6
    assert axes.get_xlabel() == "head  (· is 0, to within .0005)"


def test_components_beyond_the_largest_are_summed():
    matrix = np.random.default_rng(3).normal(size=(13, 13))
    lines, names = _figure._largest(matrix, [f"part {i}" for i in range(13)])
    assert len(names) == 8 and names[-1] == "6 others"
    assert np.array_equal(lines.sum(0), np.ones(13))  # each component stands in one line
    assert (lines @ matrix).sum() == pytest.approx(matrix.sum())
    assert f"part {np.abs(matrix).max(1).argmax()}" in names
