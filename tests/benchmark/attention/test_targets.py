"""Targets: what is asked, whether it held, what arithmetic allows, and that the catalogue asks for all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from looped import looped
from saccade.benchmark.attention import (
    BenchmarkReport,
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
from saccade.benchmark.attention.results import LimitReadings, RequirementOutcome
from saccade.benchmark.attention.targets import TargetPreset, hold_to, judging, medians, targets
from saccade.benchmark.attention.targets.arithmetic import least
from saccade.benchmark.attention.targets.catalogue import PerformanceTarget, share_of
from saccade.benchmark.attention.targets.requirements import ExtraMemory, LimitShare, NeverSlower, TileTime

CASE = Case(96, 96, heads=2, kv_heads=1, width=5, value_width=5)  # 2 * 10 * 96^2 * 2 = 368,640 operations
ADDS = LimitReadings("float32 multiply-adds (avx2)", "FLOP/s", (7.3728e9,) * 3)  # of which they take 50 us
EMPTY = LimitReadings("empty call", "s", (2e-6,) * 3)


def row(name, *readings, case=CASE, **more):
    return Measurement(case, name, "measured", readings=readings, limit=ADDS.name, **more)


OURS = row("native", 1e-4, 1e-4, 1e-4)
GROUP = MeasurementGroup(
    "",
    (
        OURS,
        row("slow", 5e-4, 5e-4, 5e-4),
        row("F.sdpa", 2e-4, 2.02e-4, 1.98e-4),
        Measurement(CASE, "OpenVINO", "none", "not installed"),
    ),
    (ADDS, EMPTY),
)


def full_and(masked, seconds):
    """A group of the masked case and the full call, in which a tile takes 1 us."""
    full = replace(masked, mask="full")
    return MeasurementGroup("", (row("native", *seconds, case=masked), row("native", *[8e-6] * 3, case=full)), (ADDS,))


HALF = replace(CASE, mask="documents:2")  # 49 and 47 tokens: with H = 2 all of the 2 x 4 tiles
DIAGONAL = replace(CASE, mask="window:1")  # 2 x 2 tiles


@looped(
    ("ask", "group", "asked", "shown", "verdict"),
    [
        (LimitShare(0.5), GROUP, "at least 50.0 % of float32 multiply-adds (avx2)", "50.0 % (50.0 % to 50.0 %)", "met"),
        (
            LimitShare(0.51),
            GROUP,
            "at least 51.0 % of float32 multiply-adds (avx2)",
            "50.0 % (50.0 % to 50.0 %)",
            "out of reach",
        ),
        (NeverSlower(), GROUP, "never slower than the best other, F.sdpa", "2.00x (1.99x to 2.01x)", "met"),
        (
            TileTime(),
            full_and(DIAGONAL, [4.4e-6] * 3),
            "at most 1.10x the full call's time for each visited tile (4; full 8)",
            "1.10x (1.10x to 1.10x)",
            "met",
        ),
        (
            TileTime(),
            full_and(HALF, [9e-6] * 3),
            "at most 1.10x the full call's time for each visited tile (8; full 8)",
            "1.12x (1.12x to 1.12x)",
            "out of reach",
        ),
    ],
)
def test_outcomes(ask, group, asked, shown, verdict):
    found = ask.outcome("target", group)
    assert (found.target, found.asked, found.shown, found.verdict) == ("target", asked, shown, verdict)
    assert found.met == (verdict == "met")


def test_what_is_missed_says_what_arithmetic_allows():
    # AVX2, a tile of 4 rows x 8 keys: nothing hidden. 3 + 14 operations beside 10 multiply-adds, and 2 us.
    assert least(CASE, GROUP).seconds == pytest.approx(2e-6 + 5e-5 * 27 / 10)
    reason = LimitShare(0.51).outcome("", GROUP).reason
    assert reason == (
        "arithmetic allows at most 36.5 %: 17 operations beside 10 multiply-adds; an empty call is 1% of it"
    )
    fast = replace(GROUP, limits=(replace(ADDS, readings=(7.3728e10,) * 3), EMPTY))
    assert LimitShare(0.1).outcome("", fast).verdict == "missed"
    unknown = replace(GROUP, limits=(replace(ADDS, name="float32 multiply-adds (mmx)"),))
    assert least(CASE, unknown) is None
    found = LimitShare(0.6).outcome("", replace(unknown, rows=(replace(OURS, limit=unknown.limits[0].name),)))
    assert (found.verdict, found.reason) == ("missed", "")


@looped(
    ("more", "expected"),
    [
        # Vector instructions on 16 pairs: (D + Dv) products, and the operations that arithmetic.py counts.
        ({}, 128 + 13),
        ({"stage": "backward"}, 2.5 * 128 + 14),
        ({"stage": "forward+backward"}, 3.5 * 128 + 13 + 14),
        ({"width": 80, "value_width": 16}, 96 + 13),
        ({"dtype": "bfloat16"}, 64 + 12.5),
        ({"dtype": "bfloat16", "stage": "backward"}, 2.5 * 64 + 15.5),
    ],
)
def test_vector_instructions_are_counted(more, expected):
    case = Case(64, 64, heads=3, kv_heads=3, **more)
    limits = [LimitReadings("float32 multiply-adds (avx512_bf16)", "FLOP/s", (32.0,))]  # one instruction a second
    if case.dtype == "bfloat16":
        limits.insert(0, LimitReadings("bf16 dot products (avx512_bf16)", "FLOP/s", (64.0,)))
    found = least(case, MeasurementGroup("", (), tuple(limits)))
    assert found.seconds == pytest.approx(3 * 64 * 64 / 16 * expected)


def test_hidden_pairs_of_a_register_tile_are_multiplied_too():
    case = Case(16, 16, "causal", heads=1, kv_heads=1)
    limit = LimitReadings("float32 multiply-adds (avx512)", "FLOP/s", (32.0,))
    found = least(case, MeasurementGroup("", (), (limit,)))
    assert found.seconds == pytest.approx(2 * 8 * 16 / 16 * 141)  # two tiles of 8 rows x 16 keys
    assert found.words == "13 operations beside 128 multiply-adds; 1.88 pairs multiplied for each visible one"


def test_decoding_takes_the_time_of_its_bytes_or_of_its_operations():
    case = Case(1, 4096, stage="decode", heads=8, kv_heads=2, width=16, value_width=16)
    adds = LimitReadings("float32 multiply-adds (avx512)", "FLOP/s", (32e9,))
    reading = LimitReadings("reading keys and values", "B/s", (1e9,))
    assert least(case, MeasurementGroup("", (), (reading, adds))).seconds == pytest.approx(4096 * 2 * 32 * 4 / 1e9)
    many = replace(case, heads=100)
    assert least(many, MeasurementGroup("", (), (reading, adds))).seconds == pytest.approx(
        100 * 256 * (32 + 13 + 45) / 1e9
    )


def test_slower_is_what_lies_below_by_more_than_the_medians_error():
    others = [1.0] * 16
    for readings, verdict in (([1.02] * 16, "missed"), ([0.98, 1.06] * 8, "met"), ([0.99] * 16, "met")):
        rows = (row("native", *readings), row("F.sdpa", *others))
        assert NeverSlower().outcome("", MeasurementGroup("", rows)).verdict == verdict


@looped(
    ("group", "reason"),
    [
        (replace(GROUP, rows=(row("native", 1e-4, 2e-4, 3e-4), *GROUP.rows[1:])), "readings of native spread"),
        (replace(GROUP, rows=(OURS, row("F.sdpa", 2e-4, 3e-4, 4e-4))), "readings of F.sdpa spread"),
        (replace(GROUP, others=0.3), "other programs took 30 % of the processors"),
    ],
)
def test_noise_decides_nothing(group, reason):
    found = NeverSlower().outcome("", group)
    assert (found.verdict, found.reason, found.met) == ("noisy", reason, False)


def test_noise_of_those_who_are_not_compared_does_not_count():
    rows = (OURS, row("slow", 5e-4, 9e-4, 2e-3), GROUP.rows[2])
    assert NeverSlower().outcome("", replace(GROUP, rows=rows, others=0.05)).verdict == "met"


def test_what_was_not_measured_is_not_met_and_says_why():
    group = MeasurementGroup("", (Measurement(CASE, "native", "none", "not built"), *GROUP.rows[1:]), GROUP.limits)
    for ask in (LimitShare(0.1), NeverSlower(), TileTime(), ExtraMemory(9.0)):
        found = ask.outcome("", group)
        assert (found.measured, found.shown, found.verdict) == (None, "native: not built", "not measured")


@pytest.mark.parametrize(("bytes_extra", "verdict"), [(15_000, "met"), (17_290, "missed")])
def test_memory(bytes_extra, verdict):
    case = replace(CASE, stage="forward+backward")
    assert case.bytes_in_and_out == 4 * (2 * 96 * 10 + 96 * 10)
    memory = PeakMemory(bytes_extra + case.bytes_of_gradients, case.bytes_of_gradients, "peak")
    weighed = MeasurementGroup("", (Measurement(case, "native", "measured", memory=memory),))
    found = ExtraMemory(1.5).outcome("", weighed)
    assert (found.measured, found.verdict) == (pytest.approx(bytes_extra / 11_520), verdict)


# --- a run ---


def outcome(title, measured, verdict="met"):
    return RequirementOutcome(title, "", measured, "", verdict)


def test_the_median_is_of_what_is_decided():
    median = medians(TargetPreset(quick=True))[0]
    titles = median.members[:4]

    def of(*outcomes):
        return judging.median_outcome(median, {title: [one] for title, one in zip(titles, outcomes, strict=False)})

    found = of(*(outcome("", x, verdict) for x, verdict in [(1.1, "met"), (0.9, "missed"), (1.5, "met"), (9, "noisy")]))
    assert (found.measured, found.shown, found.verdict) == (1.1, "1.10x of 3 calls", "missed")
    assert of(outcome("", 1.1), outcome("", 1.3), outcome("", 1.4)).verdict == "met"
    assert of(outcome("", 9.0, "noisy"), outcome("", 9.0)).verdict == "noisy"
    assert of(outcome("", None, "not measured")).verdict == "not measured"
    assert of() is None


SETTINGS = MeasurementSettings(threads=1, budget=Budget(seconds=0.0, least=2, most=2, block=1e-6))


def test_a_run_measures_what_is_chosen_and_not_decided(monkeypatch):
    every = [PerformanceTarget(title, (Entry(CASE, DenseAttention()),), (NeverSlower(),)) for title in "abcd"]
    noisy = replace(GROUP, rows=(row("native", 1e-4, 2e-4, 3e-4), *GROUP.rows[1:]))
    report = BenchmarkReport({}, {}, [replace(noisy, title="d"), replace(noisy, title="c"), replace(GROUP, title="a")])
    taken, told = [], []

    def measured(title, entries, settings):
        taken.append(title)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return replace(GROUP, title=title)

    monkeypatch.setattr(judging, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        hold_to(every, [], {"a", "b", "c"}, report, SETTINGS, lambda group: told.append(group.title))
    assert (taken, told) == (["b", "c"], ["a", "b"])
    assert [group.title for group in report.groups] == ["a", "b", "c", "d"]  # what there was is kept
    assert [one.verdict for one in report.outcomes] == ["met", "met", "noisy", "noisy"]


def test_memory_is_weighed_without_times(monkeypatch):
    weighed = PeakMemory(700, 200, "peak")
    monkeypatch.setattr(measuring, "peak_memory", lambda case, contender, threads: weighed)
    found = judging.weigh("", [Entry(CASE, DenseAttention())], SETTINGS).rows[0]
    assert (found.status, found.readings, found.memory) == ("measured", (), weighed)
    huge = judging.weigh("", [Entry(Case(1024, 1024), DenseAttention())], replace(SETTINGS, most_memory=2**20)).rows[0]
    assert (huge.status, huge.memory) == ("none", None)


def test_memory_that_cannot_be_measured_is_told(monkeypatch):
    monkeypatch.setattr(measuring, "peak_memory", lambda case, contender, threads: "no luck")
    found = judging.weigh("", [Entry(CASE, DenseAttention())], SETTINGS).rows[0]
    assert (found.memory, found.note) == (None, "no luck")


# --- the catalogue ---

ALL = targets(TargetPreset(cache=2**25, lower="avx2"))


def cases(ask, **wanted):
    """The first cases of the targets with such an ask, and with these fields."""
    found = [target.entries[0].case for target in ALL if any(isinstance(one, ask) for one in target.asks)]
    return [case for case in found if all(getattr(case, name) == value for name, value in wanted.items())]


@looped(
    ("stage", "dtype", "dots", "shares"),
    [  # full and causal at 2k and more, at 512 and 1k
        ("forward", "float32", False, (0.80, 0.75, 0.70)),
        ("forward", "float32", True, (0.80, 0.75, 0.70)),
        ("forward", "bfloat16", False, (0.75, 0.70, 0.65)),
        ("forward", "bfloat16", True, (0.72, 0.72, None)),
        ("forward+backward", "float32", True, (0.68, 0.64, None)),
        ("forward+backward", "bfloat16", False, (0.63, 0.59, None)),
        ("forward+backward", "bfloat16", True, (0.55, 0.55, None)),
    ],
)
def test_shares_of_the_limit(stage, dtype, dots, shares):
    asked = [("full", 2048), ("causal", 8192), ("causal", 512)]
    assert [share_of(stage, dtype, mask, length, dots) for mask, length in asked] == pytest.approx(shares)


@looped("dtype", ["float32", "bfloat16"])
@looped("mask", ["full", "causal"])
@looped("width", [64, 80, 128])
def test_each_width_dtype_and_mask_has_its_share(dtype, mask, width):
    same = {"dtype": dtype, "mask": mask, "width": width, "value_width": width, "batch": 1, "heads": 8, "kv_heads": 8}
    lengths = {case.length_k for case in cases(LimitShare, stage="forward", **same)}
    assert lengths == {512, 1024, 2048} | ({8192} if width == 64 else set())
    assert 2048 in {case.length_k for case in cases(LimitShare, stage="forward+backward", **same)}


def test_masks_are_held_to_the_full_call():
    timed = cases(TileTime)
    assert {(case.mask.split(":")[0], case.dtype, case.stage) for case in timed} == {
        (mask, dtype, stage)
        for mask in ("window", "padding", "documents")
        for dtype in ("float32", "bfloat16")
        for stage in ("forward", "forward+backward")
    }
    assert {case.width for case in timed} == {64, 80, 128}
    for target in ALL:
        if any(isinstance(ask, TileTime) for ask in target.asks):
            masked, full = (entry.case for entry in target.entries[:2])
            assert full == replace(masked, mask="full", length_q=full.length_q, length_k=full.length_k)


def test_decoding_is_asked_for_from_4k_to_four_caches_with_grouped_heads():
    found = cases(LimitShare, stage="decode")
    assert {case.length_q for case in found} == {1}
    assert {case.length_k for case in found if case.bytes_read < 4 * 2**25} == {4096}
    for dtype in ("float32", "bfloat16"):
        long = [case for case in found if case.dtype == dtype and case.bytes_read >= 4 * 2**25]
        assert {(case.heads, case.kv_heads) for case in long} == {(8, 8), (32, 8)}
        assert {case.width for case in long} == {64, 80, 128}


def test_small_sizes_go_through_the_choice_and_have_medians():
    titles = {title for median in medians(TargetPreset(cache=2**25)) for title in median.members}
    small = [target for target in ALL if target.entries[0].contender.name == "auto"]
    assert {target.title for target in small} == titles
    found = [target.entries[0].case for target in small]
    assert {case.length_k for case in found} == {16, 32, 64, 128, 256}
    assert {case.batch * case.heads for case in found} == {8, 32, 96}
    assert len(set(found)) == 5 * 3 * 2 * 2 * 2
    assert {target.asks for target in small} == {(NeverSlower(1.0),)}


def test_those_take_part_who_have_a_kernel():
    for target in ALL:
        case, *_ = target.entries[0]
        names = [entry.contender.name for entry in target.entries if entry.case == case][1:]
        if any(isinstance(ask, NeverSlower) for ask in target.asks):
            assert "F.sdpa" in names
            assert ("OpenVINO" in names) == (case.dtype == "float32" and case.stage in ("forward", "decode"))
    alone = targets(TargetPreset(against=()))
    assert {entry.contender.name for target in alone for entry in target.entries} == {"native", "auto"}


def test_titles_tell_targets_apart_and_a_quick_run_is_short():
    titles = [target.title for target in ALL]
    assert len(titles) == len(set(titles))
    quick = targets(TargetPreset(quick=True, lower="avx2"))
    assert len(quick) < len(ALL) / 2
    assert {type(ask) for target in quick for ask in target.asks} == {
        type(ask) for target in ALL for ask in target.asks
    }
