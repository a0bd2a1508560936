"""Series and what comes after them: windows, scales, errors, baselines, dates, and what is refused."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from looped import looped
from saccade import cli, tasks
from saccade.tasks import Forecast
from saccade.tasks._example_task import ExampleObjective
from saccade.tasks._series._dates import continued
from saccade.tasks._series._linear import STRENGTHS, linear
from saccade.tasks._series._picture import forecast_picture
from saccade.tasks._series._table import SeriesTable, Windows
from saccade.training import Reporter, Settings
from saccade.training.running_statistics import running_norms
from slowly import slow_after
from tasks.conftest import write_csv
from tasks.test_kills import survives_kills
from training.test_killing import server

__all__ = ["server"]  # a fixture

PAST, HORIZON = 29, 7
SHAPE = {"past": PAST, "horizon": HORIZON, "patch": 5, "stride": 3, "width": 8, "heads": 2, "hidden": 16, "layers": 1}
SMALL = {
    **SHAPE, "dropout": 0.0, "rate": 1e-2, "batch": 31, "steps": 150, "every": 50, "precision": "no",
    "tensorboard": False,
}  # fmt: skip
COLUMNS = ("date", "tide", "sun", "ramp")


def hours(count, first=0):
    begin = datetime.datetime(2024, 2, 27, 21)
    return [str(begin + datetime.timedelta(hours=n)) for n in range(first, first + count)]


def series(count, first=0):
    """Three series that repeat after 13, 11 and 17 hours, in units of their own."""
    n = np.arange(first, first + count)
    tide, sun = 700 + 90 * np.sin(2 * np.pi * n / 13), 0.01 * np.cos(2 * np.pi * n / 11)
    return np.stack([tide, sun, -5 + n % 17], axis=1)


def table(path, values, dates=None, columns=COLUMNS):
    dates = hours(len(values)) if dates is None else dates
    return write_csv(path, [(date, *row) for date, row in zip(dates, values.tolist(), strict=True)], columns)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    table(folder / "series.csv", series(401))
    table(folder / "later.csv", series(101, 401), hours(101, 401))
    return folder


@pytest.fixture(scope="module")
def learned(tables):
    return tasks.train("forecast", tables / "series.csv", tables / "run", **SMALL)


@pytest.fixture(scope="module")
def noise(tables):
    """An untrained model of series that a linear map does not forecast, and a table of the same."""
    draws = np.random.default_rng(5).normal(size=(293, 3)).cumsum(axis=0) * (1, 10, 100)
    table(tables / "noise.csv", draws[:211])
    table(tables / "noise-later.csv", draws[211:], hours(82, 211))
    return tasks.train("forecast", tables / "noise.csv", tables / "noise", **{**SMALL, "steps": 1})


@pytest.mark.slow
def test_learns_what_can_be_learned(learned, tables):
    report = tasks.test(learned, tables / "later.csv")
    assert report.metrics["MSE"] < 0.01  # of a variance of 1
    assert report.baselines["last value repeated"]["MSE"] > 0.5


@pytest.mark.slow
def test_does_not_learn_what_cannot_be_learned(tables, tmp_path):
    """That no window reads what it is to forecast: rows in a random order have no past."""
    values = np.random.default_rng(3).permutation(series(502))
    run = tasks.train("forecast", table(tmp_path / "known.csv", values[:401]), tmp_path / "run", **SMALL)
    report = tasks.test(run, table(tmp_path / "asked.csv", values[401:]), baseline=False)
    assert report.metrics["MSE"] > 0.9


def test_errors_are_those_of_plain_numpy(noise, tables):
    """Scaled by the training rows alone, over every window of the test file, each step and each series by itself."""
    report = tasks.test(noise, tables / "noise-later.csv")
    known, tested = (
        np.loadtxt(tables / f"{name}.csv", delimiter=",", skiprows=1, usecols=(1, 2, 3))
        for name in ("noise", "noise-later")
    )
    known = known[: 211 - 21]  # a tenth validates
    scale = known.std(axis=0)
    truth = (tested - known.mean(axis=0)) / scale
    errors = []
    for now in range(PAST, len(truth) - HORIZON + 1):
        errors.append(truth[now - 1] - truth[now : now + HORIZON])
    repeated = report.baselines["last value repeated"]
    assert repeated["MSE"] == pytest.approx(np.mean(np.square(errors)), rel=1e-12)
    assert repeated["MAE"] == pytest.approx(np.mean(np.abs(errors)), rel=1e-12)
    assert len(report.tested.data) == len(errors) == 82 - PAST - HORIZON + 1

    details = noise.task.details(report.tested.baselines[0].outputs, report.tested.data).values
    np.testing.assert_allclose(details["steps"]["MSE"], np.square(errors).mean(axis=(0, 2)))
    np.testing.assert_allclose(details["steps"]["MAE"], np.abs(errors).mean(axis=(0, 2)))
    units = [one["MAE unscaled"] for one in details["series"].values()]
    np.testing.assert_allclose(units, np.abs(errors).mean(axis=(0, 1)) * scale)
    assert list(details["series"]) == ["tide", "sun", "ramp"]


def test_windows_that_validate_have_no_future_that_is_trained_on(noise, tables):
    task = noise.task
    whole = task.read(tables / "noise.csv")
    training, judged = task.split(whole, 0.1, 0)
    assert (training[0].start, training[-1].end) == (0, 190)
    assert (judged[0].now, judged[-1].end) == (190, 211)
    assert len(judged) == 21 - HORIZON + 1
    few, short = task.split(whole, 0.001, 0)
    assert (len(short), short[0].now, few[-1].end) == (1, 204, 204)  # a share is one horizon at least


@pytest.mark.parametrize("alike", [True, False])
def test_the_linear_baseline_is_scikit_learns(alike):
    """One ridge regression for all series, or one each, whichever is better on the validation windows."""
    from sklearn.linear_model import Ridge

    random = np.random.default_rng(7)
    draws = random.normal(size=(331, 3))
    rates = (0.6, 0.6, 0.6) if alike else (0.9, -0.9, 0.2)
    for n in range(1, 331):
        draws[n] += np.array(rates) * draws[n - 1] + (0.3 if alike else (0.3, -0.2, 0.1))
    past, horizon, ends = 11, 5, (0, 61 if alike else 173, 257, 331)  # with few windows one map for all is better
    empty = SeriesTable(None, (), draws, None, "", "")
    parts, pairs = [], []
    for first, last in itertools.pairwise(ends):
        parts.append((draws, Windows(empty, past, horizon, range(first, last - past - horizon + 1))))
        rows = [draws[one.start : one.end].T for one in parts[-1][1]]  # (3, S + F) each
        pairs.append((np.stack(rows)[:, :, :past], np.stack(rows)[:, :, past:]))  # (N, 3, S), (N, 3, F)
    (x, y), (judged_x, judged_y), (asked, _) = pairs

    def forecasts(shared, strength, inputs):
        made = []
        for n in range(3):
            chosen = slice(None) if shared else slice(n, n + 1)
            known = x[:, chosen].reshape(-1, past), y[:, chosen].reshape(-1, horizon)
            made.append(Ridge(strength * len(known[0])).fit(*known).predict(inputs[:, n]))
        return np.stack(made, axis=-1)

    choices = [(shared, strength) for shared in (True, False) for strength in STRENGTHS]
    errors = [np.square(forecasts(*one, judged_x) - judged_y.transpose(0, 2, 1)).mean() for one in choices]
    shared, strength = choices[int(np.argmin(errors))]
    found, name = linear(*parts)
    assert shared == alike
    assert name == f"{'one map for all series' if shared else 'a map for each series'}, ridge {strength:g}"
    np.testing.assert_allclose(found, forecasts(shared, strength, asked), atol=1e-5)


def test_parts_of_a_batch_add_up_to_the_whole(noise, tables):
    training, judged = noise.task.split(noise.task.read(tables / "noise.csv"), 0.1, 0)
    made = ExampleObjective(noise.task, noise.model, training, judged, Settings(steps=9, batch=13, seed=3))
    batch = made.batch(1)
    parts = made.split(batch, 3)
    assert [len(part["past"]) for part in parts] == [5, 4, 4]
    shares = [made.weight(part) / made.weight(batch) for part in parts]

    model = copy.deepcopy(noise.model)

    def losses():
        joined = sum(share * made.loss(model, part) for share, part in zip(shares, parts, strict=True))
        return joined, made.loss(model, batch)

    torch.testing.assert_close(*losses())
    model.train()
    joined, whole = losses()
    assert abs(joined - whole) > 1e-4  # each part has means and variances of its own
    for norm in running_norms(model):
        norm.eval()
    torch.testing.assert_close(*losses())


def test_parts_with_statistics_of_their_own_are_told(tables, tmp_path):
    told = []

    class Told(Reporter):
        def warned(self, message):
            told.append(message)

    for accumulate in (1, 3):
        few = {**SMALL, "steps": 1, "accumulate": accumulate}
        tasks.train("forecast", tables / "series.csv", tmp_path / str(accumulate), reporter=Told(), **few)
    assert told == [
        "batch norm: each of 3 parts of a step is normalised by the mean and variance of its own 11 items, so "
        "results differ from undivided batches of 31"
    ]


@pytest.mark.parametrize("tuning", slow_after(1, [{"last": 1}, {"lora": 2}]))
def test_norms_that_do_not_learn_keep_their_statistics(tables, tmp_path, tuning):
    shape = {**SMALL, "layers": 2, "steps": 2}
    first = tasks.train("forecast", tables / "series.csv", tmp_path / "first", **shape)
    few = {**SMALL, "steps": 3, "every": 2}  # two steps after a look
    run = tasks.train("forecast", tables / "series.csv", tmp_path / "run", initial=first.folder, **few, **tuning)
    before, after = first.model.state_dict(), run.model.state_dict()
    moved = {
        name.split("blocks.")[1][0] for name in before if "running_" in name and (before[name] != after[name]).any()
    }
    assert moved == ({"1"} if "last" in tuning else set())


def test_transformers_opens_the_run_and_says_the_same(noise, tables):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PatchTSTForPrediction.from_pretrained(noise.folder).eval()
    data = noise.task.read(tables / "noise-later.csv")
    batch = noise.task.collate(noise.model, noise.task.encode(noise.model, data))
    with torch.no_grad():
        expected = theirs(past_values=batch["past"]).prediction_outputs
    torch.testing.assert_close(torch.tensor(np.stack(noise.task.predict(noise.model, data))), expected)


def test_a_prediction_is_the_forecast_of_the_last_window_in_the_units_of_the_file(noise, tables, tmp_path):
    data = noise.task.read(tables / "noise-later.csv")
    forecast = noise.task.predict(noise.model, data)[11]
    lines = (tables / "noise-later.csv").read_text().splitlines()
    (tmp_path / "begun.csv").write_text("\n".join(lines[: 1 + 11 + PAST]) + "\n")
    (found,) = tasks.predict(noise, tmp_path / "begun.csv")
    assert list(found) == list(COLUMNS)
    assert found["date"] == [line.partition(",")[0] for line in lines[1 + 11 + PAST :][:HORIZON]]
    known = np.loadtxt(tables / "noise.csv", delimiter=",", skiprows=1, usecols=(1, 2, 3))[:190]
    expected = forecast * known.std(axis=0) + known.mean(axis=0)
    np.testing.assert_allclose(np.stack([found[name] for name in COLUMNS[1:]], axis=1), expected, rtol=1e-5)


def test_series_are_known_by_their_names(noise, tables, tmp_path):
    """Columns of a test may stand in another order, among others."""
    lines = [line.split(",") for line in (tables / "noise-later.csv").read_text().splitlines()]
    moved = [f"{c},x,{a},{date},{b}" for date, a, b, c in lines]
    (tmp_path / "moved.csv").write_text("\n".join(moved).replace("date", "hour") + "\n")
    expected = tasks.test(noise, tables / "noise-later.csv").as_dict()
    found = tasks.test(noise, tmp_path / "moved.csv", date="hour").as_dict()
    assert {**found, "data": ""} == {**expected, "data": ""}


def test_some_columns(tables):
    task = Forecast(columns='ramp, "sun"', **SHAPE)
    data = task.read(tables / "series.csv")
    assert data.table.names == ("ramp", "sun")
    np.testing.assert_array_equal(data.table.values, series(401)[:, [2, 1]])


def test_a_constant_series_is_left_as_it_is():
    values = np.stack([np.full(40, 7.0), np.arange(40.0)], axis=1)
    empty = SeriesTable(None, ("a", "b"), values, None, "h", "")
    task = Forecast(**SHAPE).fitted(Windows(empty, PAST, HORIZON, range(5)))
    assert task.means == (7.0, 19.5) and task.deviations[0] == 1.0


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_values_of_any_size_are_scaled_alike(tmp_path, size):
    """Squares of such values are no float64: every scaled value was 0, and the error nearly nothing."""
    kind, found = Forecast(**SHAPE), []
    for name, factor in (("plain.csv", 1.0), ("far.csv", size)):
        data = kind.read(table(tmp_path / name, series(67)[:, 1:] * factor, hours(67), COLUMNS[:1] + COLUMNS[2:]))
        found.append(kind.fitted(data).scaled(data.table))
    assert found[0].std() > 0.9
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("far", [1e13, 1e306])
def test_values_too_far_from_the_training_rows_are_refused(noise, tables, tmp_path, far):
    """Float32 holds neither their squares nor, at last, the values."""
    rows = [line.split(",") for line in (tables / "noise-later.csv").read_text().splitlines()]
    rows[41][1] = repr(far)
    with pytest.raises(ValueError, match=r"far.csv: column 'tide': 1e\+\d+ is too far from the training rows"):
        tasks.test(noise, write_csv(tmp_path / "far.csv", rows[1:], rows[0]))


@looped(
    ("last", "step", "expected"),
    [
        ("2024-02-28 23:30", "15min", ["2024-02-28 23:45", "2024-02-29 00:00"]),
        ("2024-02-28 23:59:30", "30s", ["2024-02-29 00:00:00", "2024-02-29 00:00:30"]),
        ("2024-02-28 23:59", "30s", ["2024-02-28 23:59:30", "2024-02-29 00:00:00"]),
        ("2024-02-28T23:00:00+02:00", "h", ["2024-02-29T00:00:00+02:00", "2024-02-29T01:00:00+02:00"]),
        ("2024-02-28", "D", ["2024-02-29", "2024-03-01"]),
        ("2023-12-01", "MS", ["2024-01-01", "2024-02-01"]),
        ("2024-01", "MS", ["2024-02", "2024-03"]),
        ("2024-02-29", "B", ["2024-03-01", "2024-03-04"]),
        ("20240229", "W-THU", ["20240307", "20240314"]),
        ("1999", "YS-JAN", ["2000", "2001"]),
    ],
)
def test_dates_go_on_as_they_are_written(last, step, expected):
    assert continued(last, step, 2) == expected


@pytest.mark.parametrize(
    ("dates", "step"),
    [
        ([f"2024-{month:02}-01" for month in range(1, 13)], "MS"),
        (["2024-01-04", "2024-01-05", "2024-01-08", "2024-01-09", "2024-01-10", "2024-01-11"], "B"),
        ([f"2024-01-01T{hour:02}:00+01:00" for hour in range(24)], "h"),
        (["2001", "2002", "2003", "2004"], "YS-JAN"),
        (["2024-03-31T00:00+01:00", "2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00", "2024-03-31T04:00+02:00"], "h"),
        (["2024-10-27 01:30:00+0200", "2024-10-27 02:30:00+0200", "2024-10-27 02:30:00+0100"], "h"),
        (["2024-03-09T00:00-08", "2024-03-10T00:00-08", "2024-03-11T00:00-07", "2024-03-12T00:00-07"], "D"),
        ([f"2024-{month:02}-01T00:00:00{'+02:00' if 3 < month < 11 else '+01:00'}" for month in range(1, 13)], "MS"),
    ],
)
def test_steps_of_calendars_are_even(tmp_path, dates, step):
    data = table(tmp_path / "a.csv", np.arange(2.0 * len(dates)).reshape(-1, 2), dates, ("date", "a", "b"))
    task = Forecast(past=2, horizon=1, patch=1, stride=1)
    assert task.read(data).table.step == step


def spoiled(line, cell, value):
    """series.csv with another cell."""
    rows = [list(row) for row in zip(hours(50), *series(50).T.tolist(), strict=True)]
    rows[line - 2][cell] = value
    return rows


@looped(
    ("rows", "message"),
    [
        (
            spoiled(7, 0, "yesterday"),
            "line 7: expected a date such as 2024-01-31 or 2024-01-31 13:00, got 'yesterday'$",
        ),
        (spoiled(7, 0, "02/03/2024"), "line 7: expected a date such as 2024-01-31"),
        (
            spoiled(7, 0, "2024-02-28 01:00:00"),
            "line 7: 2024-02-28 01:00:00 does not come after 2024-02-28 01:00:00 in",
        ),
        (
            spoiled(7, 0, "2024-02-28 02:30:00"),
            r"line 7: expected 2024-02-28 02:00:00 at even steps of hours, got 2024-0",
        ),
        (spoiled(7, 0, "2024-02-28T02:00+01:00"), "line 7: .* mixed time zones, .* has an offset from UTC and"),
        (
            spoiled(9, 2, "n/a"),
            r"bad.csv: 1 of 150 cells have no number: line 9 'sun' \('n/a'\); fill=previous or fill=linear fills them$",
        ),
        (spoiled(9, 2, ""), r"no number: line 9 'sun' \(''\); fill="),
        (spoiled(9, 3, "nan"), r"no number: line 9 'ramp' \('nan'\); fill="),
        (spoiled(9, 1, "inf"), r"no number: line 9 'tide' \('inf'\); 'inf' is no empty cell: fix it"),
        (spoiled(2, 0, "x")[1:36], r"bad.csv: 35 rows, expected at least 36, one window of past=29 and horizon=7$"),
        (
            spoiled(2, 0, "x")[1:43],
            r"bad.csv: 42 rows, expected at least 43: 7 to validate, and one window of past=29 and ho",
        ),
        ([], "bad.csv: holds no examples$"),
    ],
)
def test_bad_tables_are_told_in_one_line(tmp_path_factory, rows, message):
    folder = tmp_path_factory.mktemp("bad")
    data = write_csv(folder / "bad.csv", rows, COLUMNS)
    with pytest.raises(ValueError, match=message) as raised:
        tasks.train("forecast", data, folder / "out", **SMALL)
    assert "\n" not in str(raised.value)
    assert not (folder / "out").exists()


def test_a_missing_month_is_found(tmp_path):
    """The steps of months differ in length: only the calendar says which is missing."""
    dates = [f"{year}-{month:02}-01" for year in (2021, 2022, 2023) for month in range(1, 13)]
    del dates[19]
    data = table(tmp_path / "a.csv", np.arange(35.0)[:, None], dates, ("date", "a"))
    with pytest.raises(ValueError, match="a.csv: 1 date is missing: 2022-08-01; fill="):
        Forecast(past=5, horizon=3, patch=2).read(data)


def gappy(path):
    """A day each, from which the 5th to the 7th, the 11th and two numbers are missing."""
    rows = [(f"2024-01-{day:02}", day, day**2) for day in range(1, 30) if day not in (5, 6, 7, 11)]
    rows[12], rows[-1] = (*rows[12][:2], ""), (rows[-1][0], "n/a", rows[-1][2])
    return write_csv(path, rows, ("date", "a", "b"))


def test_all_gaps_are_named_at_once(tmp_path):
    """Each was an error of its own, once the one before was mended."""
    with pytest.raises(ValueError, match="missing") as raised:
        Forecast(past=5, horizon=3, patch=2).read(gappy(tmp_path / "a.csv"))
    assert str(raised.value).endswith(
        "a.csv: 4 dates are missing: 2024-01-05 to 2024-01-07, 2024-01-11; 2 of 50 cells have no number: "
        "line 14 'b' (''), line 26 'a' ('n/a'); fill=previous or fill=linear fills them"
    )


@pytest.mark.parametrize("fill", ["previous", "linear"])
def test_gaps_are_filled_as_numpy_fills_them(tmp_path, fill):
    with pytest.warns(UserWarning, match=f"4 dates are missing: .* 2 of 50 cells .*; filled: {fill}$"):
        found = Forecast(past=5, horizon=3, patch=2, fill=fill).read(gappy(tmp_path / "a.csv")).table
    n = np.arange(1, 30)
    known = [[day for day in n if day not in (5, 6, 7, 11, without)] for without in (29, 17)]
    for column, days, power in zip(found.values.T, known, (1, 2), strict=True):
        before = np.array([max(day for day in days if day <= one) for one in n])
        line = np.interp(n, days, np.power(days, power))
        np.testing.assert_allclose(column, line if fill == "linear" else before**power)
    assert len(found.dates) == 29


def test_only_what_says_that_it_is_empty_is_filled(tmp_path):
    data = write_csv(
        tmp_path / "a.csv", [(f"2024-01-{day:02}", "1,5" if day == 7 else day) for day in range(1, 30)], ("date", "a")
    )
    with pytest.raises(ValueError, match=r"line 8 'a' \('1,5'\); '1,5' is no empty cell"):
        Forecast(past=5, horizon=3, patch=2, fill="linear").read(data)


def test_other_bad_input(noise, tables, tmp_path):
    def train(data=tables / "series.csv", **options):
        return tasks.train("forecast", data, tmp_path / "out", **{**SMALL, **options})

    write_csv(tmp_path / "twice.csv", [("2024-01-01", 1, 2)], ("date", "a", "a"))
    write_csv(tmp_path / "alone.csv", [("2024-01-01",)], ("date",))
    (tmp_path / "list.jsonl").write_text("[1]\n")
    cases = [
        (
            {"columns": "tide,moon"},
            r"series.csv: no column 'moon' in the first line, .*; it has 'date', 'tide', 'sun', 'ramp'$",
        ),
        (
            {"date": "hour"},
            r"series.csv: no column 'hour' in the first line, .*; it has 'date', 'tide', 'sun', 'ramp'$",
        ),
        ({"columns": "tide,tide"}, "columns: expected names separated by commas, each once, got 'tide,tide'"),
        ({"columns": ""}, "columns: expected names separated by commas, each once, got ''"),
        ({"data": tmp_path / "twice.csv"}, "twice.csv: the column 'a' is there twice"),
        ({"data": tmp_path / "alone.csv"}, "alone.csv: no column except 'date', expected one for each series"),
        ({"data": tmp_path / "list.jsonl"}, r"list.jsonl: line 1: expected an object with 'date', got \[1\]"),
        ({"horizon": 0}, "horizon: must be at least 1, got 0"),
        ({"heads": 3}, "heads: must divide the width, got heads=3 and width=8"),
        ({"dropout": 1.0}, r"dropout: must be in \[0, 1\), got 1.0"),
        ({"past": 5}, "past: must be more than the steps of a patch, got past=5, patch=5"),
        (
            {"initial": noise.folder, "horizon": 11},
            "noise: is a model of past 29, horizon 7, 3 series; asked for past 29, horizon 11, 3 series",
        ),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            train(**options)
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        TypeError, match="horizon: cannot differ from what forecast was trained with; expected one of da"
    ):
        tasks.test(noise, tables / "later.csv", horizon=11)
    with pytest.raises(
        ValueError,
        match="forecast reads a file of series, .csv, .tsv or .jsonl, no texts or standard input; got the text 'rain'",
    ):
        tasks.predict(noise, "rain")
    days = [str(datetime.date(2024, 1, 1) + datetime.timedelta(days=n)) for n in range(50)]
    data = table(tmp_path / "days.csv", series(50), days)
    third = [str(datetime.datetime(2024, 1, 1) + datetime.timedelta(hours=3 * n)) for n in range(50)]
    rare = table(tmp_path / "third.csv", series(50), third)  # every third hour: another step, and no gaps
    with pytest.raises(
        ValueError, match="line 3: expected 2024-01-01 01:00:00 at even steps of hours, got 2024-01-01 03"
    ):
        tasks.test(noise, rare)
    with pytest.raises(ValueError, match="line 3: expected 2024-01-01 01:00:00 at even steps of hours, got 2024-01-02"):
        tasks.test(noise, data)


def test_a_picture_says_whose_error_it_has_and_of_which_windows():
    import pandas as pd

    dates = pd.date_range("2024-01-28", periods=23, freq="D")
    found = SeriesTable(Path("a.csv"), ("$a$",), np.arange(23.0)[:, None], dates, "D", "2024-02-19")
    for count, told in ((6, "The last two windows that do not overlap, of 6"), (3, "The last window, of 3")):
        data = Windows(found, 7, 5, range(count))
        forecasts = {"this model": [np.zeros((5, 1))] * count}
        drawn = forecast_picture(data, forecasts, [0.25], (np.zeros(1), np.ones(1)), "svg").decode()
        assert told in drawn and "MSE: this model" in drawn and "$a$: MSE 0.250" in drawn
        assert "<!-- Feb -->" in drawn and "2024-02-0" not in drawn  # short dates, which do not collide


def test_a_run_starts_from_another(noise, tables, tmp_path):
    run = tasks.train(
        "forecast", tables / "series.csv", tmp_path / "run", initial=noise.folder, **{**SMALL, "steps": 1}
    )
    before, after = noise.model.state_dict(), run.model.state_dict()
    moved = max(float((before[name] - after[name]).abs().max()) for name, _ in run.model.named_parameters())
    assert 0 < moved < 2 * SMALL["rate"]
    assert run.task.means != noise.task.means


@pytest.mark.slow
def test_kills(server, tmp_path):
    """What a forecaster adds: batch norm, whose means and variances are no weights."""
    data = str(table(tmp_path / "series.csv", series(151)))
    options = """--past 29 --horizon 7 --patch 5 --stride 3 --width 8 --heads 2 --hidden 16 --layers 1 --batch 17
    --accumulate 2 --precision bf16 --steps 17 --every 5 --checkpoint-every 3""".split()
    files = survives_kills(server, tmp_path, ["train", "forecast", data, *options], 3)
    assert {"task.json", "config.json", "model.safetensors", "last.safetensors"} <= files


@pytest.mark.slow
def test_train_test_predict(tables, tmp_path, capsys, monkeypatch):
    out, picture = tmp_path / "run", tmp_path / "forecast.png"
    options = [f"--{name}={value}" for name, value in SMALL.items() if name != "tensorboard"]
    data, later = str(tables / "series.csv"), str(tables / "later.csv")
    assert cli.main(["train", "forecast", data, "--out", str(out), *options, "--no-tensorboard"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("forecast: PatchTST of ") and "326 examples to train on, 34 to validate" in told[1]
    assert cli.main(["test", str(out), later, "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{out} on {later}: 66 examples" or "baseline is better" in lines[0]
    assert any(line.startswith("last value repeated") for line in lines)
    assert any(line.startswith("linear (") for line in lines)
    assert [line.split()[0] for line in lines[-4:-1]] == ["tide", "sun", "ramp"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["predict", str(out), later]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["date"] == hours(HORIZON, 502)
    expected = series(HORIZON, 502)
    assert np.abs(found["tide"] - expected[:, 0]).max() < 0.3 * 90
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["predict", str(out), later]) == 0
    assert next(line.split()[-1] for line in capsys.readouterr().out.splitlines()) == "ramp"
