"""What is printed, in a notebook and in a terminal; tables."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.monitoring import _tables
from saccade.monitoring._aggregates import RunningSums
from saccade.support._numbers import compact

B, L, H, D = 3, 7, 2, 5


class Named(nn.Module):
    """Attention in modules of any name."""

    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, Attend())

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


class Attend(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def observed(*names, **options):
    model = Named(*names)
    with saccade.watch(model, **options) as seen:
        model(torch.randn(B, H, L, D))
    return seen


def test_a_line_for_each_call_with_the_range_over_heads():
    seen = observed("one", "two", alarms=False)
    lines = str(seen).splitlines()
    assert lines[0] == "2 attention calls a step, 1 of 1 step observed."
    assert lines[2].split("  ")[0].strip() == "layer"
    row = re.split(r"\s{2,}", lines[3].strip())
    assert row[:3] == ["0", "one", "2"]
    means = [seen.aggregates["one"][head]["entropy"].mean for head in range(H)]
    assert row[3] == f"{compact(min(means))}..{compact(max(means))}"
    assert repr(seen) == str(seen)


def test_lines_fit_the_page_and_every_number_is_there():
    x = torch.randn(B, H, L, D, requires_grad=True)
    model = Named(*(f"a_module_with_a_name_that_is_far_too_long_to_be_shown_{n}" for n in range(3)))
    with saccade.watch(model, gradients=True) as seen:
        model(x * 1e3).sum().backward()
    lines = str(seen).splitlines()
    assert max(map(len, lines)) <= 120
    tables = [line.split() for line in lines if line.lstrip().startswith("layer ")]
    assert len(tables) > 1  # as many as it takes
    for title in ("entropy", "previous", "distance", "out"):
        assert sum(title in table for table in tables) >= 1
    assert sum(line.lstrip().startswith("2  ...") for line in lines) == len(tables)


def test_alarms_go_on_in_the_next_line():
    model, x = Named("x" * 60), torch.randn(B, H, L, D)
    x[0, 0, 0, 0] = float("nan")
    with saccade.watch(model) as seen:
        model(x)
    (alarm,) = seen.alarms
    first, second = str(seen).splitlines()[3:5]
    assert second.startswith("    ") and max(len(first), len(second)) <= 120
    assert f"{first} {second.strip()}".strip() == str(alarm)
    assert f"<li>{alarm}</li>" in seen._repr_html_()


def test_the_heads_with_the_least_and_the_greatest_are_named():
    seen = observed("one", "two", alarms=False)
    lines = str(seen).splitlines()
    start = lines.index("Minimum and maximum over all heads:")
    line = next(line.split() for line in lines[start:] if line.split()[:1] == ["entropy"])
    means = {(n, h): seen.aggregates[n][h]["entropy"].mean for n in ("one", "two") for h in range(H)}
    low, high = min(means, key=means.get), max(means, key=means.get)
    assert line[1:] == [
        compact(means[low]),
        low[0],
        "head",
        str(low[1]),
        compact(means[high]),
        high[0],
        "head",
        str(high[1]),
    ]
    low, high = (choose(range(H), key=lambda h: means["two", h]) for choose in (min, max))
    assert f'title="least: head {low}, greatest: head {high}"' in seen._repr_html_()


def test_a_grid_has_a_column_for_each_head():
    seen = observed("one", "two", alarms=False)
    head, *lines = seen.grid("mass.self").splitlines()
    assert head.split() == ["layer", "call", "head", "0", "head", "1"]
    for line, name in zip(lines, ("one", "two"), strict=True):
        cells = line.split()
        assert cells[1] == name
        assert cells[2:] == [compact(seen.aggregates[name][head]["mass.self"].mean) for head in range(H)]
    with pytest.raises(ValueError, match="statistic must be one of .*entropy.*; got 'entrop'"):
        seen.grid("entrop")
    html = seen.grid("mass.self")._repr_html_()  # in a notebook, where text would be one line of \\n
    cells = [re.sub("<[^>]+>", " ", row).split() for row in html.split("<tr>")[1:]]
    assert cells == [line.split() for line in (head, *lines)]


def test_names_are_escaped_and_long_ones_cut():
    seen = observed("<b>bold</b>", "a" * 99, alarms=False)
    html = seen._repr_html_()
    assert "<b>" not in html and "&lt;b&gt;bold" in html
    assert "a" * 99 in html
    assert "a" * 99 not in str(seen) and "..." + "a" * 41 in str(seen)
    assert html.count("<table") == html.count("</table>") == 1
    assert "http" not in html and "<script" not in html


def test_a_notebook_is_shown_so_many_calls(monkeypatch):
    seen = observed("one", "two", "three", alarms=False)
    assert seen._repr_html_().count("<tr>") == 4 and "calls more" not in seen._repr_html_()
    monkeypatch.setattr(_tables, "MOST_CALLS", 2)
    assert seen._repr_html_().count("<tr>") == 3 and "... and 1 calls more" in seen._repr_html_()


def test_alarms_stand_at_the_top():
    model = Attend()
    query = torch.randn(B, H, L, D)
    query[0, 0, 0, 0] = float("nan")
    with saccade.watch(model) as seen:
        model(query)
    assert str(seen).splitlines()[2].startswith("Alarms: 1 error")
    assert "not finite" in seen._repr_html_()


def test_the_table():
    seen = observed("one", "two", received=True)
    table = seen.table()
    statistics = {line["statistic"] for line in table}
    assert {
        "entropy",
        "evenness",
        "largest",
        "distance",
        "mass.self",
        "logits.max",
        "out.norm",
        "received.max",
    } <= statistics
    assert len(table) == 2 * H * len(statistics)
    line = next(x for x in table if (x["call"], x["head"], x["statistic"]) == ("two", 1, "entropy"))
    assert list(line) == ["call", "layer", "head", "statistic", "count", "mean", "spread", "min", "max"]
    assert line["mean"] == seen.aggregates["two"][1]["entropy"].mean


def test_a_data_frame():
    pandas = pytest.importorskip("pandas")
    seen = observed("one", "two")
    frame = seen.table(pandas=True)
    assert isinstance(frame, pandas.DataFrame)
    grid = frame.pivot_table(index="call", columns=["statistic", "head"], values="mean")
    assert grid.loc["two", ("entropy", 1)] == seen.aggregates["two"][1]["entropy"].mean
    assert list(saccade.watch(Named()).table(pandas=True).columns)[:3] == ["call", "layer", "head"]


def test_a_data_frame_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas"):
        observed("one").table(pandas=True)


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.0, "0"), (1.23456, "1.23"), (1234.5, "1234"), (0.00012, "1e-04"), (-0.5, "-0.5"), (123456.0, "1.235e+05")],
)
def test_numbers_are_short(number, shown):
    assert compact(number) == shown


def test_aggregates_of_parts_are_those_of_the_whole():
    """Counts, means, spreads and extremes, whatever the split, also of numbers far from 0."""
    samples = 1000 + torch.randn(2, 5, H, 13)
    counted = torch.rand(1, 5, 1, 13) > 0.4
    whole = RunningSums.of(("a", "b"), samples, counted)
    parts = [RunningSums.of(("a", "b"), samples[:, b : b + 1], counted[:, b : b + 1]) for b in range(5)]
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.join(part)
    for head in range(H):
        for place, name in enumerate(("a", "b")):
            kept = samples[place, :, head][counted[0, :, 0]].double()
            for found in (whole, joined):
                got = found.of_heads()[head][name]
                assert got.count == kept.numel()
                assert got.mean == pytest.approx(float(kept.mean()), rel=1e-9)
                assert got.spread == pytest.approx(float(kept.std(correction=0)), rel=1e-5)
                assert (got.min, got.max) == (float(kept.min()), float(kept.max()))


def test_statistics_that_come_and_go():
    first = RunningSums.of(("a",), torch.full((1, 1, 1, 2), 3.0), torch.tensor(True))
    second = RunningSums.of(("b", "a"), torch.tensor([5.0, 1.0]).view(2, 1, 1, 1), torch.tensor(True))
    (head,) = first.join(second).of_heads()
    assert (head["a"].count, head["a"].mean, head["a"].min, head["a"].max) == (3, pytest.approx(7 / 3), 1.0, 3.0)
    assert (head["b"].count, head["b"].mean, head["b"].spread) == (1, 5.0, 0.0)


def test_no_samples_are_nan_and_not_zero():
    (head,) = RunningSums.of(("a",), torch.zeros(1, 1, 1, 2), torch.tensor(False)).of_heads()
    assert head["a"].count == 0 and head["a"].mean != head["a"].mean
