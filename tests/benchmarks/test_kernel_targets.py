"""Targets: what is asked, whether it held, and that the preset asks for all of it."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from looped import looped
from saccade.benchmark.attention import (
    Budget,
    Case,
    DenseAttention,
    Entry,
    Measurement,
    MeasurementGroup,
    MeasurementSettings,
    PeakMemory,
    measuring,
)
from saccade.benchmark.attention.cases import DTYPES, decoding
from saccade.benchmark.attention.results import LimitReadings

PATH = Path(__file__).parents[2] / "benchmarks" / "kernel_targets.py"
spec = importlib.util.spec_from_file_location("kernel_targets", PATH)
kernel_targets = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernel_targets  # dataclasses look their module up
spec.loader.exec_module(kernel_targets)
ExtraMemory, LimitShare = kernel_targets.ExtraMemory, kernel_targets.LimitShare
RelativeTime, SpeedupRequirement = kernel_targets.RelativeTime, kernel_targets.SpeedupRequirement
TargetPreset, targets, weigh = kernel_targets.TargetPreset, kernel_targets.targets, kernel_targets.weigh

CASE = Case(100, 100, heads=2, kv_heads=1, width=5, value_width=5)  # 400,000 operations
LIMIT = LimitReadings("float32 multiply-adds (avx2)", "FLOP/s", (8e9, 8e9, 8e9))
ROWS = (
    Measurement(CASE, "native", "measured", readings=(1e-4, 1e-4, 1e-4), limit=LIMIT.name),
    Measurement(CASE, "F.sdpa", "measured", readings=(2e-4, 3e-4, 2.5e-4), limit=LIMIT.name),
)
GROUP = MeasurementGroup("", ROWS, (LIMIT,))


@looped(
    ("ask", "asked", "measured", "shown", "met"),
    [
        (LimitShare(0.5), "at least 50.0 % of float32 multiply-adds (avx2)", 0.5, "50.0 % (50.0 % to 50.0 %)", True),
        (LimitShare(0.51), "at least 51.0 % of float32 multiply-adds (avx2)", 0.5, "50.0 % (50.0 % to 50.0 %)", False),
        (SpeedupRequirement(2.5), "at least 2.50x the speed of F.sdpa", 2.5, "2.50x (2.25x to 2.75x)", True),
        (SpeedupRequirement(2.6), "at least 2.60x the speed of F.sdpa", 2.5, "2.50x (2.25x to 2.75x)", False),
        (RelativeTime(0.5, "the whole", 0, 1), "at most 0.50x the whole", 0.4, "0.40x (0.37x to 0.45x)", True),
        (RelativeTime(2.4, "the whole", 1, 0), "at most 2.40x the whole", 2.5, "2.50x (2.25x to 2.75x)", False),
    ],
)
def test_outcomes(ask, asked, measured, shown, met):
    found = ask.outcome("target", GROUP)
    assert (found.target, found.asked, found.shown, found.met) == ("target", asked, shown, met)
    assert found.measured == pytest.approx(measured)


@looped(("power", "met"), [(1.0, True), (1.04, True), (1.06, False), (2.0, False)])
def test_growth(power, met):
    cases = [replace(CASE, length_q=1024 * n, length_k=1024 * n) for n in (8, 16, 64)]
    rows = [Measurement(case, "native", "measured", readings=(1e-6 * case.length_k**power,)) for case in cases]
    found = kernel_targets.TimeGrowth(1.05, (0, 1, 2)).outcome("", MeasurementGroup("", tuple(rows)))
    assert found.asked == "at most L^1.050 from L=8k to 64k"
    assert found.measured == pytest.approx(power)
    assert found.met is met
    assert (
        kernel_targets.TimeGrowth(1.05, (0, 1)).value(
            MeasurementGroup("", (rows[0], Measurement(CASE, "native", "none")))
        )
        is None
    )


@pytest.mark.parametrize(("bytes_extra", "met"), [(15_000, True), (18_001, False)])
def test_memory(bytes_extra, met):
    case = replace(CASE, stage="forward+backward")
    assert case.bytes_in_and_out == 4 * (2 * 100 * 10 + 100 * 10)
    memory = PeakMemory(bytes_extra + case.bytes_of_gradients, case.bytes_of_gradients, "peak")
    found = ExtraMemory(1.5).outcome(
        "", MeasurementGroup("", (Measurement(case, "native", "measured", memory=memory),))
    )
    assert found.measured == pytest.approx(bytes_extra / 12_000)
    assert found.met is met


def test_what_was_not_measured_is_not_met_and_says_why():
    group = MeasurementGroup("", (Measurement(CASE, "native", "none", "not built"), ROWS[1]), (LIMIT,))
    for ask in (LimitShare(0.1), SpeedupRequirement(0.1), RelativeTime(9.0, "x"), ExtraMemory(9.0)):
        found = ask.outcome("", group)
        assert found.measured is None
        assert found.shown == "native: not built"
        assert not found.met


ALL = targets(TargetPreset(cache=2**25))


def asked(**wanted):
    """The bounds asked of the subject's case with these fields, by kind of ask and length."""
    found = {}
    for target in ALL:
        case = target.entries[0].case
        if all(getattr(case, name) == value for name, value in wanted.items()):
            for ask in target.asks:
                found.setdefault(type(ask).__name__, {})[case.length_k] = ask.bound
    return found


@looped("width", [64, 128])
@looped(
    ("stage", "dtype", "mask", "share", "faster", "medium"),
    [
        ("forward", "float32", "full", 0.72, 2.1, 1.5),
        ("forward", "float32", "causal", 0.66, 2.3, 1.5),
        ("forward", "bfloat16", "full", 0.70, 4.0, 3.0),
        ("forward", "bfloat16", "causal", 0.64, 4.2, 3.0),
        ("forward+backward", "float32", "full", 0.60, 1.9, None),
        ("forward+backward", "float32", "causal", 0.52, 2.2, None),
        ("forward+backward", "bfloat16", "full", 0.50, 2.2, None),
        ("forward+backward", "bfloat16", "causal", 0.42, 2.5, None),
    ],
)
def test_long_and_medium_sequences(width, stage, dtype, mask, share, faster, medium):
    found = {"LimitShare": {}, "SpeedupRequirement": {}}
    for target in ALL:
        case = target.entries[0].case
        names = [entry.contender.name for entry in target.entries]
        if (case.stage, case.dtype, case.mask, case.width) == (stage, dtype, mask, width) and names == [
            "native",
            "F.sdpa",
        ]:
            assert (case.batch, case.heads, case.kv_heads, case.value_width) == (1, 8, 8, width)
            for ask in target.asks:
                found[type(ask).__name__][case.length_k] = ask.bound
    long = (2048, 4096, 8192, 16384)
    speeds = {length: faster for length in long}
    if medium is not None:
        speeds.update(dict.fromkeys((256, 512, 1024), medium))
    assert found["SpeedupRequirement"] == speeds
    assert found["LimitShare"] == {length: share for length in long if stage != "forward" or length >= 4096}


def test_the_other_targets():
    assert asked(mask="window:256", stage="forward")["SpeedupRequirement"] == {8192: 3.0}
    assert "TimeGrowth" in asked(mask="window:256", stage="forward")
    assert asked(mask="window:256", stage="backward") == {"RelativeTime": {8192: 3.3}}
    for mask in ("padding:half", "documents:2"):
        assert asked(mask=mask) == {"RelativeTime": {4096: 0.6}}
        halves = [target for target in ALL if target.entries[0].case.mask == mask]
        assert {target.entries[0].case.stage for target in halves} == {"forward", "forward+backward"}
        for target in halves:
            assert abs(target.entries[0].case.work - 0.5) < 0.001
            assert target.entries[1].case == replace(target.entries[0].case, mask="full")
    lower = [target for target in ALL if target.entries[0].contender.name == "native:avx2"]
    assert [target.asks for target in lower] == [(LimitShare(0.70),)] * 2
    assert {entry.case.length_k for target in lower for entry in target.entries} == {4096}


def test_decoding_is_asked_for_on_caches_four_times_the_processors():
    found = [target for target in ALL if target.entries[0].case.stage == "decode"]
    assert {(target.entries[0].case.dtype, target.entries[0].case.width) for target in found} == {
        (dtype, width) for dtype in ("float32", "bfloat16") for width in (64, 128)
    }
    for target in found:
        case = target.entries[0].case
        assert case.length_q == 1
        assert 4 * 2**25 <= case.bytes_read < 4.1 * 2**25
        assert target.asks == (LimitShare(0.80), SpeedupRequirement(1.0))


def test_small_sizes_go_through_the_choice_with_and_without_gradients():
    small = [target for target in ALL if target.entries[0].contender.name == "auto"]
    cases = [target.entries[0].case for target in small]
    assert {case.length_k for case in cases} == {16, 32, 64, 128, 256}
    assert {case.batch * case.heads for case in cases} == {8, 32, 96}
    assert {case.stage for case in cases} == {"forward", "forward+backward"}
    assert {case.dtype for case in cases} == {"float32", "bfloat16"}
    assert len(set(cases)) == 5 * 3 * 2 * 2 * 2
    assert {target.asks for target in small} == {(SpeedupRequirement(1.0),)}
    assert {target.entries[1].contender.name for target in small} == {"F.sdpa"}


def test_memory_is_asked_for_at_32k():
    weighed = [target for target in ALL if target.weighed]
    assert {target.entries[0].case.length_k for target in weighed} == {32768}
    assert {target.entries[0].case.stage for target in weighed} == {"forward+backward"}
    assert {target.asks for target in weighed} == {(ExtraMemory(1.5),)}


def test_titles_tell_targets_apart_and_a_quick_run_is_part_of_all():
    titles = [target.title for target in ALL]
    assert len(titles) == len(set(titles))
    quick = targets(TargetPreset(cache=2**25, quick=True))
    assert {target.title for target in quick if not target.weighed} < set(titles)
    assert {entry.case.dtype for target in quick for entry in target.entries} <= set(DTYPES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_is_filled(dtype):
    case = decoding(
        10**7, Case(3, 3, stage="decode", dtype=dtype, batch=2, heads=6, kv_heads=3, width=5, value_width=7)
    )
    assert case.length_q == 3
    assert case.length_k % 1024 == 0
    token = 2 * 3 * (5 + 7) * DTYPES[dtype].itemsize
    assert 10**7 <= case.bytes_read < 10**7 + 1024 * token


QUICK = MeasurementSettings(threads=1, budget=Budget(seconds=0.0, least=2, most=2, block=1e-6))


def test_memory_is_weighed_without_times(monkeypatch):
    weighed = PeakMemory(700, 200, "peak")
    monkeypatch.setattr(measuring, "peak_memory", lambda case, contender, threads: weighed)
    row = weigh("", [Entry(CASE, DenseAttention())], QUICK).rows[0]
    assert (row.status, row.readings, row.memory) == ("measured", (), weighed)
    huge = weigh("", [Entry(Case(1024, 1024), DenseAttention())], replace(QUICK, most_memory=2**20)).rows[0]
    assert (huge.status, huge.memory) == ("none", None)


def test_memory_that_cannot_be_measured_is_told(monkeypatch):
    monkeypatch.setattr(measuring, "peak_memory", lambda case, contender, threads: "no luck")
    row = weigh("", [Entry(CASE, DenseAttention())], QUICK).rows[0]
    assert (row.memory, row.note) == (None, "no luck")
