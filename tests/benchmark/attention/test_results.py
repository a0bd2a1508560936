"""Results: their arithmetic, their way to JSON and back, and how they read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from looped import looped
from saccade.benchmark.attention import (
    BenchmarkReport,
    Case,
    Measurement,
    MeasurementGroup,
    tables,
)
from saccade.benchmark.attention.results import LimitReadings, exponents, series
from saccade.support import _numbers

CASE = Case(100, 100, heads=2, kv_heads=1, width=5, value_width=5)  # 2 * 10 * 10^4 * 2 = 400,000 operations
PEAK = LimitReadings("float32 multiply-adds (avx2)", "FLOP/s", (8e9, 4e9, 8e9))
MACHINE = {
    "processor": "Abacus",
    "cores": 7,
    "threads": 3,
    "last_level_cache": 5 * 2**20,
    "memory": 2**30,
    "system": "x",
    "instruction_set": "avx2",
    "saccade": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11",
    "date": "2026-01-02T03:04:05",
    "load_before": 0.1,
}


def row(name, *readings, case=CASE, **more):
    return Measurement(case, name, "measured", readings=readings, limit=PEAK.name, error=0.25, **more)


OURS = row("native", 1e-4, 2e-4, 1e-4)
GROUP = MeasurementGroup(
    "the title", (OURS, row("F.sdpa", 3e-4, 6e-4, 3.3e-4), Measurement(CASE, "dense", "none", "no room")), (PEAK,)
)


def report(*groups, **more):
    return BenchmarkReport(dict(MACHINE), {"command": "saccade bench --length 100"}, list(groups), **more)


def test_rates_shares_and_speedups():
    assert CASE.flops == 400_000
    assert OURS.rate == pytest.approx(4e9)
    # The clock halved in the second round, for the limit and for the contender.
    assert GROUP.share(OURS) == pytest.approx((0.5, 0.5, 0.5))
    assert GROUP.speedup(OURS, over=GROUP.rows[1]).median == pytest.approx(3.0)
    assert GROUP.speedup(OURS, over=GROUP.rows[2]) is None
    assert GROUP.share(replace(OURS, limit=None)) is None


def test_noise_is_told():
    assert not OURS.noisy or OURS.seconds.spread > 0.15
    assert row("x", 1.0, 1.0, 1.01).noisy is False
    assert row("x", 1.0, 2.0, 3.0).noisy is True
    calm, wild = (
        report(MeasurementGroup("", (row("x", 1.0, 1.0, 1.0),))),
        report(MeasurementGroup("", (row("x", 1.0, 2.0, 3.0),))),
    )
    assert not any("noisy" in note for note in tables.notes(calm))
    assert any(note.startswith("! 1 of 1 rows are noisy") for note in tables.notes(wild))
    wild.machine["load_before"] = 2.5
    assert any("load average was 2.5" in note for note in tables.notes(wild))


def test_json_there_and_back():
    slow = MeasurementGroup("slow", (OURS, row("F.sdpa", 1.0, 2.0, 3.0, setup=12.0)), (PEAK,))
    whole = report(slow, GROUP, exponents=[{"series": "native", "time": 2.0, "from": 1, "to": 2}])
    assert BenchmarkReport.from_json(whole.as_json()) == whole
    read = json.loads(whole.as_json())
    assert read["groups"][1]["rows"][2]["note"] == "no room"
    for line in (line for group in read["groups"] for line in group["rows"]):
        line["memory"] = None  # as version 0.2 wrote it
    assert BenchmarkReport.from_json(json.dumps(read)) == whole


def test_what_is_no_number_is_null_in_json():
    wrong = Measurement(CASE, "x", "wrong", error=float("nan"))
    assert BenchmarkReport.from_json(report(MeasurementGroup("", (wrong,))).as_json()).rows[0].error is None


@looped("text", ["{}", '{"groups": 3}', "[]", "nonsense", '{"groups": [{}]}'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError) as raised:
        BenchmarkReport.from_json(text)
    if "groups" in text or text == "{}":
        assert str(raised.value).startswith("not a report of a benchmark: ")


def test_the_table():
    lines = tables.group_lines(GROUP)
    assert lines[:2] == ["the title", "  limit: float32 multiply-adds (avx2) 8.00 GFLOP/s"]
    assert lines[2].split() == ["contender", "time", "spread", "rate", "of", "limit", "native", "is"]
    assert lines[3].split() == ["native", "100", "us", "50", "%", "!", "4.00", "GFLOP/s", "50", "%", "-"]
    assert lines[4].split()[:3] == ["F.sdpa", "330", "us"]
    assert lines[4].endswith("3.00x as fast")
    assert lines[5].split() == ["dense", "-", "-", "-", "-", "-", "no", "room"]
    assert all(line == line.rstrip() for line in lines)


def test_rows_of_several_cases_name_theirs():
    half = replace(CASE, mask="documents:2")
    group = MeasurementGroup("half", (row("native", 1e-4, case=half), row("native", 2e-4)))
    table = tables.group_table(group, cases=True)
    header, cells = table.head, table.rows
    assert header[0] == "case"
    assert [line[0] for line in cells] == [half.label, CASE.label]
    assert [line[header.index("work")] for line in cells] == ["50 %", "100 %"]


def test_a_limit_that_is_not_known_is_not_made_up():
    group = MeasurementGroup("", (replace(OURS, limit=None),))
    assert "not known" in tables.group_lines(group)[2]
    assert any("limit is unknown" in note for note in tables.notes(report(group)))


def test_bytes_are_read_when_decoding():
    case = Case(1, 1000, stage="decode", heads=1, kv_heads=1, width=10, value_width=10)
    group = MeasurementGroup("", (row("native", 1e-6, case=case),))
    assert case.bytes_read == 80_000
    assert "80.0 GB/s" in tables.group_lines(group)[2]


def test_noise_is_no_fact():
    wild = replace(GROUP, rows=(row("native", 1e-4, 1e-4, 1e-4), row("F.sdpa", 1e-4, 2e-4, 3e-4)), limits=())
    assert tables.group_lines(wild)[-2].split()[-1] == "noisy"
    busy = replace(GROUP, rows=(row("native", 1e-4, 1e-4, 1e-4),), others=0.25)
    assert "0.0 % !" in "".join(tables.group_lines(busy))
    assert any("while 1 groups were timed, up to 25 %" in note for note in tables.notes(report(busy)))


def growing(name, power, lengths, **more):
    cases = [replace(CASE, length_q=length, length_k=length, **more) for length in lengths]
    return [row(name, 1e-9 * case.length_k**power, case=case) for case in cases]


def test_growth_is_fitted_by_contender_and_case():
    rows = [
        *growing("a", 2, (100, 300, 200)),
        *growing("b", 1, (100, 200, 150)),
        *growing("a", 1.5, (100, 200, 300), mask="causal"),
        *growing("two lengths always fit", 1, (100, 200)),
    ]
    found = exponents(report(*(MeasurementGroup("", (one,)) for one in rows)))
    assert [(entry["series"], entry["from"], entry["to"]) for entry in found] == [
        ("a forward float32 full H=2/1 D=5", 100, 300),
        ("b forward float32 full H=2/1 D=5", 100, 200),
        ("a forward float32 causal H=2/1 D=5", 100, 300),
    ]
    assert [entry["time"] for entry in found] == pytest.approx([2, 1, 1.5])


def test_one_length_is_no_series():
    once = row("a", 1e-3)
    assert series(report(MeasurementGroup("", (once,)))) == []
    assert series(report(MeasurementGroup("", (once, once)))) == []


def test_caches_of_decoding_are_one_series():
    cases = [Case(1, length, stage="decode") for length in (100, 1000)]
    assert len(series(report(MeasurementGroup("", tuple(row("a", 1e-3, case=case) for case in cases))))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_figure_is_drawn(kind):
    figure = pytest.importorskip("saccade.benchmark.attention.figure")
    cases = [replace(CASE, length_q=length, length_k=length) for length in (100, 200, 400)]
    rows = [row(name, 1e-6 * case.length_k**2, case=case) for name in ("native", "F.sdpa") for case in cases]
    drawn = figure.draw(report(MeasurementGroup("", tuple(rows))), kind)
    assert drawn.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    if kind == "svg":
        assert drawn == figure.draw(report(MeasurementGroup("", tuple(rows))), kind)


def test_a_figure_needs_two_lengths():
    figure = pytest.importorskip("saccade.benchmark.attention.figure")
    with pytest.raises(ValueError, match="two lengths or more"):
        figure.draw(report(GROUP), "png")


@looped(
    ("told", "text"),
    [
        (_numbers.number(345.4), "345"),
        (_numbers.number(0.0345), "0.0345"),
        (_numbers.number(12345.6), "12,346"),
        (_numbers.number(0), "0"),
        (_numbers.duration(0.0123), "12.3 ms"),
        (_numbers.duration(2.5e-7), "250 ns"),
        (_numbers.duration(90), "90.0 s"),
        (_numbers.size(3 * 2**30), "3.00 GiB"),
        (_numbers.size(5), "5.00 B"),
        (_numbers.rate(2.5e11, "FLOP/s"), "250 GFLOP/s"),
        (_numbers.percent(0.725), "72 %"),
        (_numbers.percent(0.0312), "3.1 %"),
        (_numbers.length(8192), "8k"),
        (_numbers.length(1000), "1000"),
    ],
)
def test_numbers_as_they_are_read(told, text):
    assert told == text
