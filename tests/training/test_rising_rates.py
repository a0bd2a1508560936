"""The range test: a quadratic whose largest stable rate is known, and a language model."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from looped import looped
from saccade import cli
from saccade.training import RangeTest, range_test


def descent(curvature: float, start: float = 3.0):
    """Steps of gradient descent on `curvature x^2 / 2`, stable for rates below 2 / curvature."""
    at = start

    def step(rate: float) -> float:
        nonlocal at
        loss = curvature * at * at / 2
        at -= rate * curvature * at
        return loss

    return step


@pytest.mark.parametrize("curvature", [0.37, 5.0, 211.0])
def test_the_edge_is_the_largest_stable_rate_of_a_quadratic(curvature):
    result = range_test(descent(curvature), low=1e-5, high=100.0, steps=301, smoothing=0.0, factor=1e6)
    assert result.diverged
    ratio = (100.0 / 1e-5) ** (1 / 300)
    assert 2 / curvature / ratio <= result.edge < 2 / curvature
    assert result.steepest <= 1 / curvature * ratio  # at 1 / curvature a step goes all the way
    assert result.suggestion == min(result.edge / 10, result.steepest)


def test_many_dimensions_with_autograd():
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64)).Q
    matrix = rotation @ torch.diag(torch.full((7,), 13.0, dtype=torch.float64)) @ rotation.T
    x = torch.ones(7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x])

    def step(rate):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = x @ matrix @ x / 2
        loss.backward()
        optimizer.step()
        return loss.item()

    result = range_test(step, low=1e-4, high=10.0, steps=201, smoothing=0.0)
    ratio = 1e5 ** (1 / 200)
    assert 2 / 13 / ratio <= result.edge < 2 / 13


def test_rates_rise_by_the_same_factor_and_means_are_corrected_for_their_start():
    losses = iter([8.0, 4.0, 2.0, 3.0, 5.0])
    result = range_test(lambda rate: next(losses), low=0.01, high=100.0, steps=5, smoothing=0.5, factor=9.0)
    assert result.rates == pytest.approx([0.01, 0.1, 1.0, 10.0, 100.0])
    assert result.losses == (8.0, 4.0, 2.0, 3.0, 5.0)
    expected = [8.0, (8 + 8) / 3, (8 + 8 + 8) / 7, (8 + 8 + 8 + 24) / 15, (8 + 8 + 8 + 24 + 80) / 31]
    assert result.smoothed == pytest.approx(expected)
    assert not result.diverged
    assert result.edge == pytest.approx(1.0)  # the loss it led to is the lowest of the means


@pytest.mark.parametrize("end", [math.nan, math.inf, 1e9])
def test_it_stops_where_it_diverges(end):
    losses = [4.0, 3.0, 2.0, end, 1.0]
    result = range_test(lambda rate: losses.pop(0), steps=5, smoothing=0.0)
    assert result.diverged
    assert losses == [1.0]
    assert len(result.rates) == (4 if math.isfinite(end) else 3)


@looped(
    ("options", "message"),
    [
        ({"low": 0.0}, "low, high: rates must be positive, finite and rising, got 0 and 1"),
        ({"low": 2.0}, "low, high: rates must be positive, finite and rising, got 2 and 1"),
        ({"high": math.inf}, "got 1e-06 and inf"),
        ({"high": math.nan}, "got 1e-06 and nan"),
        ({"steps": 1}, "steps: a range has at least 2 rates, got 1"),
        ({"smoothing": 1.0}, r"smoothing: must be in \[0, 1\), got 1.0"),
        ({"factor": 1.0}, "factor: must be above 1, got 1.0"),
    ],
)
def test_bad_ranges(options, message):
    with pytest.raises(ValueError, match=message):
        range_test(descent(1.0), **options)


OPTIONS = "--layers 1 --heads 2 --width 32 --context 23 --batch 8 --precision no --vocabulary 283 --high 10".split()


@pytest.mark.slow
def test_the_command(story, tmp_path, capsys):
    command = ["train", "rate", str(story), *OPTIONS, "--steps", "60"]
    assert cli.main([*command, "--out", str(tmp_path / "rate")]) == 0
    table = capsys.readouterr().out
    begin, head, *_ = table.splitlines()
    assert begin.startswith("60 steps with rates from ") and begin.endswith(f" on {story}; a table follows")
    assert head.split() == ["rate", "loss", "smoothed"]
    assert "suggested: --rate " in table
    assert {path.name for path in (tmp_path / "rate").iterdir()} == {"rate.csv", "rate.json", "rate.png"}
    found = json.loads((tmp_path / "rate" / "rate.json").read_text())
    rows = list(csv.DictReader((tmp_path / "rate" / "rate.csv").read_text().splitlines()))
    assert [float(row["rate"]) for row in rows] == found["rates"]
    assert [float(row["smoothed"]) for row in rows] == found["smoothed"]
    made = RangeTest(tuple(found["rates"]), tuple(found["losses"]), tuple(found["smoothed"]), found["diverged"])
    assert (made.edge, made.suggestion) == (found["edge"], found["suggestion"])
    # A rate that learns: AdamW on a model this small is known to like 1e-3 to 1e-1.
    assert 1e-4 < found["suggestion"] < 0.1
    assert found["diverged"]
    # The same again, to the bit.
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--low", "1", "--high", "0.1"], "--low, --high: rates must be positive, finite and rising, got 1 and 0.1"),
        (["--steps", "1"], "steps: a range has at least 2 rates, got 1"),
        (["--out", "{story}"], "is a file, expected a folder to write the curve into"),
        (["--heads", "5"], "heads: must divide the width"),
    ],
)
def test_bad_input_is_one_line(story, tmp_path, capsys, options, message):
    options = [option.format(story=story) for option in options]
    assert cli.main(["train", "rate", str(story), *OPTIONS, *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("saccade: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
