"""Targets: what is asked, whether it held, what arithmetic allows, and who takes part."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from looped import looped
from saccade.benchmark.attention import (
    Budget,
    Case,
    CaseInputs,
    DenseAttention,
    Entry,
    Measurement,
    MeasurementGroup,
    MeasurementSettings,
    SaccadeAttention,
    measure,
    sets,
)
from saccade.benchmark.attention.machine import own_limit
from saccade.benchmark.attention.results import LimitReadings

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import attention_targets
from targets import judging
from targets.arithmetic import least
from targets.catalogue import PEERS, PerformanceTarget, TargetPreset, medians, targets
from targets.judging import TargetReport, hold_to
from targets.memory import EXTRA, answer, bytes_in_and_out, weigh
from targets.page import outcome_line, page
from targets.requirements import ExtraMemory, LimitShare, NeverSlower, RequirementOutcome, TileTime
from targets.runtimes import OnnxRuntimeAttention
from targets.subject import EMPTY_CALL, SubjectAttention, empty_call

sys.path.pop()  # its tasks.py would be found in place of the folder tests/tasks

CASE = Case(96, 96, heads=2, kv_heads=1, width=5, value_width=5)  # 2 * 10 * 96^2 * 2 = 368,640 operations
ADDS = LimitReadings("float32 multiply-adds (avx2)", "FLOP/s", (7.3728e9,) * 3)  # of which they take 50 us
EMPTY = LimitReadings(EMPTY_CALL, "s", (2e-6,) * 3)


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
    assert (found.verdict, found.reason) == ("noisy", reason)


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
    assert bytes_in_and_out(CASE) == 4 * (2 * 96 * 10 + 96 * 10)
    weighed = MeasurementGroup("", (Measurement(CASE, "native", "none"),), (LimitReadings(EXTRA, "B", (bytes_extra,)),))
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
    report = TargetReport({}, {}, [replace(noisy, title="d"), replace(noisy, title="c"), replace(GROUP, title="a")])
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


MEMORY = Case(512, 512, "causal", "forward+backward", heads=2, kv_heads=2, width=16, value_width=16)


def test_the_memory_of_a_call_leaves_gradients_out(threads, monkeypatch):
    threads(1)
    monkeypatch.setattr("targets.memory.growth", lambda call: (call() and 1_000_000, "peak"))
    asked = json.dumps({"case": MEMORY.as_json(), "backend": "chunked", "threads": 1})
    assert answer(asked) == 1_000_000 - 3 * 2 * 512 * 16 * 4


@pytest.mark.slow  # processes that import torch
def test_memory_is_measured_in_a_process_of_its_own():
    group = weigh("", Entry(MEMORY, SaccadeAttention("chunked")), 1)
    assert (group.rows[0].readings, group.limit(EXTRA) > 0) == ((), True)
    wrong = weigh("", Entry(MEMORY, SaccadeAttention("nonsense")), 1)
    assert wrong.rows[0].note.startswith("not measured: ValueError: backend must be one of")
    assert wrong.limits == ()


def test_the_page_has_every_outcome():
    machine = {"processor": "Abacus", "cores": 7, "threads": 3, "instruction_set": "avx2", "saccade": "0.1.0"}
    machine |= {"torch": "2.13.0", "date": "2026-01-02T03:04:05"}
    outcomes = [
        RequirementOutcome("a|b", "at least 2x", 3.0, "3.00x", "met"),
        RequirementOutcome("d", "at least 9x", 1.0, "1.00x", "out of reach", "arithmetic allows at most 2.50x"),
        RequirementOutcome("f", "at least 9x", None, "not built", "not measured"),
    ]
    report = TargetReport(machine, {"command": "it --quick"}, [replace(GROUP, title="t")], outcomes=outcomes)
    text = page(report)
    assert text.startswith("# Speed and memory of attention\n\n    it --quick\n\nAbacus, 3 of 7 cores")
    assert outcome_line(report) == "1 of 3 targets are met, 1 are out of reach, 1 are not measured."
    assert "| a\\|b | at least 2x | 3.00x | yes |  |" in text
    assert "| d | at least 9x | 1.00x | NO: out of reach | arithmetic allows at most 2.50x |" in text
    assert "**t** (limit: float32 multiply-adds (avx2) 7.37 GFLOP/s, empty call 2.00 us)" in text


@pytest.mark.slow
def test_the_script_measures_and_resumes(monkeypatch, capsys, tmp_path):
    entries = (Entry(Case(32, 32), SubjectAttention("chunked")), Entry(Case(32, 32), DenseAttention()))
    every = [PerformanceTarget("one thing", entries, (NeverSlower(0.0),)), PerformanceTarget("two thing", entries, ())]
    monkeypatch.setattr(attention_targets, "targets", lambda preset: every)
    monkeypatch.setattr(attention_targets, "medians", lambda preset: [])
    file, markdown = tmp_path / "it.json", tmp_path / "it.md"
    given = f"--backend chunked,auto --threads 1 --seconds 0 --rounds 1 --json {file} --markdown {markdown}".split()
    assert attention_targets.main([*given, "--only", "one"]) in (0, 4)  # noisy beside other programs
    assert [group["title"] for group in json.loads(file.read_text())["groups"]] == ["one thing"]
    assert attention_targets.main([*given, "--resume"]) in (0, 4)
    written = json.loads(file.read_text())
    assert [group["title"] for group in written["groups"]] == ["one thing", "two thing"]
    assert "two thing" in markdown.read_text()
    written["machine"]["torch"] = "1.0"
    file.write_text(json.dumps(written))
    with pytest.raises(SystemExit, match="torch of .* is 1.0, here"):
        attention_targets.main([*given, "--resume"])
    with pytest.raises(SystemExit, match="no target has the words nonsense"):
        attention_targets.main([*given, "--only", "nonsense"])


# --- the subject and its peers ---


def test_a_forced_set_has_a_limit_of_its_own(monkeypatch):
    active = ["avx512"]

    class Native:
        @staticmethod
        def active():
            return active[-1]

        @staticmethod
        def use(name):
            active.append(name.rstrip("!"))

        @staticmethod
        def peak_f32(threads, milliseconds):
            return {"avx2": 50.0, "avx512": 100.0}[active[-1]]

        @staticmethod
        def peak_bf16(threads, milliseconds):
            return None if active[-1] == "avx2" else 300.0

    monkeypatch.setattr(sets, "compiled", lambda: Native)
    wide, narrow = (CaseInputs.make(replace(CASE, dtype=dtype)) for dtype in ("float32", "bfloat16"))
    subjects = [SubjectAttention("native", name) for name in (None, "avx2")]
    found = [subject.limits(inputs, 1)[:-1] for inputs in (wide, narrow) for subject in subjects]
    assert [[(limit.name, limit.meter()) for limit in of_case] for of_case in found] == [
        [("float32 multiply-adds (avx512)", 100.0)],
        [("float32 multiply-adds (avx2)", 50.0)],
        [("bf16 dot products (avx512)", 300.0), ("float32 multiply-adds (avx512)", 100.0)],
        [("float32 multiply-adds (avx2)", 50.0)],
    ]
    assert own_limit(narrow.case, found[2]) is found[2][0]
    assert active[-1] == "avx512"


@pytest.mark.parametrize(("stage", "made"), [("forward", 1), ("forward+backward", 4), ("backward", 3)])
def test_an_empty_call_makes_its_results_and_computes_nothing(stage, made, monkeypatch):
    inputs = CaseInputs.make(replace(CASE, stage=stage, length_q=7, value_width=3))
    call, shapes = empty_call(inputs), []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("empty", "new_empty", "empty_like"):
                shapes.append(tuple(found.shape))
            else:
                # The tests fill what is made with NaN.
                assert func.overloadpacket.__name__ in ("detach", "alias", "fill_"), func
            return found

    with Count():
        call()
    out, leaves = (1, 2, 7, 3), [tuple(leaf.shape) for leaf in inputs.leaves]
    assert shapes == {1: [out], 3: leaves, 4: [out, *leaves]}[made]


RUNTIMES = {"onnxruntime": ("onnx", "onnxruntime"), "openvino": ("openvino",)}


@pytest.mark.slow  # imports a runtime
@pytest.mark.parametrize("word", RUNTIMES)
@looped("mask", ["full", "causal", "window:5", "causal+alibi"])
@looped("kv_heads", [6, 3])
def test_runtimes_compute_attention(word, mask, kv_heads):
    for module in RUNTIMES[word]:
        pytest.importorskip(module)
    runtime, case = PEERS[word], Case(40, 40, mask, batch=2, heads=6, kv_heads=kv_heads, width=13, value_width=7)
    row = measure("", [Entry(case, runtime)], MeasurementSettings(2, Budget(0.0, 1, 1))).rows[0]
    if word == "openvino" and kv_heads < 6:
        assert (row.status, row.note) == ("none", "it takes no grouped heads")
    else:
        assert (row.status, row.note) == ("measured", "")


@looped("word", RUNTIMES)
def test_runtimes_say_what_is_missing(word, monkeypatch):
    for module in RUNTIMES[word]:
        monkeypatch.setitem(sys.modules, module, None)
    row = measure("", [Entry(CASE, PEERS[word])], MeasurementSettings(1, Budget(0.0, 1, 1))).rows[0]
    assert (row.status, row.note) == ("none", f"not installed ({RUNTIMES[word][0]})")


@looped(
    ("more", "words"),
    [({"dtype": "bfloat16"}, "its attention is float32 here"), ({"stage": "backward"}, "it has no backward")],
)
def test_runtimes_say_what_they_cannot(more, words):
    with pytest.raises(ValueError, match=words):
        OnnxRuntimeAttention.operands(CaseInputs.make(replace(CASE, **more)))


# --- the catalogue ---

ALL = targets(TargetPreset(cache=2**25, lower="avx2"))


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
