"""`saccade bench`, from the command line to the files it writes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from saccade import cli
from saccade.benchmark.attention import (
    BenchmarkReport,
    Case,
    Contender,
    DenseAttention,
    Entry,
    PeakMemory,
    SaccadeAttention,
    SdpaAttention,
    measuring,
    targets as attention_targets,
)
from saccade.benchmark.attention.targets import catalogue
from saccade.benchmark.attention.targets.requirements import NeverSlower

TINY = "bench --threads 1 --seconds 0 --rounds 1 --batch 2 --heads 2 --width 8 --against sdpa,dense".split()


@pytest.mark.slow
def test_a_sweep_prints_a_table(capsys):
    given = "--length 16,32,64 --mask causal,padding:half --pass forward --backend auto,chunked"
    assert cli.main([*TINY, *given.split()]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    lines = shown.out.splitlines()
    titles = [line for line in lines if line.startswith("forward")]
    assert len(titles) == 6
    assert titles[0].startswith("forward float32 causal B=2 H=2 L=16 D=8; work 53 %")
    for name in ("auto", "chunked", "F.sdpa", "dense"):
        assert sum(line.split()[:1] == [name] for line in lines) == 6 + 2  # measurements, and exponents
    assert "\x1b" not in shown.out


@pytest.mark.slow
def test_every_list_is_swept(capsys):
    given = "--length 32 --queries 1,3 --heads 2,4 --kv-heads 2 --value-width 5 --dtype bfloat16 --mask full"
    assert cli.main([*TINY, *given.split(), *"--pass decode --backend chunked --json -".split()]) == 0
    report = BenchmarkReport.from_json(capsys.readouterr().out)
    cases = [group.rows[0].case for group in report.groups]
    assert [(case.length_q, case.heads, case.kv_heads) for case in cases] == [
        (1, 2, 2),
        (3, 2, 2),
        (1, 4, 2),
        (3, 4, 2),
    ]
    assert {(case.dtype, case.width, case.value_width) for case in cases} == {("bfloat16", 8, 5)}
    assert report.settings["clock"] == "wall"
    assert report.settings["command"].startswith("saccade")
    assert report.machine["threads"] == 1
    assert report.machine["torch"] == torch.__version__
    assert {row.status for row in report.rows} == {"measured"}


@pytest.mark.slow
def test_files_are_written_and_shown_again(monkeypatch, tmp_path, capsys):
    weighed = PeakMemory(9000, 1000, "peak")
    monkeypatch.setattr(measuring, "peak_memory", lambda case, contender, threads: weighed)
    files = {kind: tmp_path / f"it.{kind}" for kind in ("json", "md", "svg")}
    given = ["--json", str(files["json"]), "--markdown", str(files["md"]), "--plot", str(files["svg"])]
    assert cli.main([*TINY, *given, "--length", "32,64", "--backend", "auto", "--against", "none"]) == 0
    first = capsys.readouterr().out
    read = json.loads(files["json"].read_text())
    assert [group["rows"][0]["memory"]["peak"] for group in read["groups"]] == [9000] * 2
    assert files["md"].read_text().startswith("# Speed and memory of attention")
    assert files["svg"].read_text().startswith("<?xml")
    assert cli.main(["bench", "--from", str(files["json"])]) == 0
    assert capsys.readouterr().out == first


class Wrong(Contender):
    name = "wrong"

    def forward(self, inputs):
        right = DenseAttention().forward(inputs)
        return lambda: right() * 1.01


def test_a_wrong_result_is_exit_status_1(monkeypatch, capsys):
    from saccade.cli import bench

    monkeypatch.setattr(bench, "contenders_of", lambda given, quick: [Wrong(), DenseAttention()])
    assert cli.main([*TINY, "--length", "32"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: out is off by" in out
    assert "1 results were WRONG, so no speed is shown for them." in out


def test_ctrl_c_shows_what_there_is(monkeypatch, tmp_path, capsys):
    measure, count = measuring.measure, iter(range(9))

    def second_is_stopped(*given):
        if next(count):
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(measuring, "measure", second_is_stopped)
    file = tmp_path / "it.json"
    assert cli.main([*TINY, "--length", "32,64", "--backend", "auto", "--json", str(file)]) == 130
    assert "L=32" in capsys.readouterr().out
    assert len(BenchmarkReport.from_json(file.read_text()).groups) == 1


TARGETS = "bench --targets --threads 1 --seconds 0 --rounds 1 --backend chunked,auto --against sdpa".split()


def two_targets(monkeypatch, *asks):
    """`--targets` has one of these asks, and one of none."""
    case = Case(32, 32)
    entries = (Entry(case, SaccadeAttention("chunked")), Entry(case, SdpaAttention()))
    every = [
        catalogue.PerformanceTarget("one thing", entries, asks),
        catalogue.PerformanceTarget("two thing", entries, ()),
    ]
    monkeypatch.setattr(attention_targets, "targets", lambda preset: every)
    monkeypatch.setattr(attention_targets, "medians", lambda preset: [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "others", "status", "met"),
    [(0.0, 0.0, 0, "1 of 1 targets are met."), (0.9, 0.0, 3, "1 are missed."), (0.0, 0.9, 4, "1 are noisy.")],
)
def test_targets_are_judged(monkeypatch, capsys, factor, others, status, met):
    monkeypatch.setattr(measuring, "watch_others", lambda: lambda: others)
    two_targets(monkeypatch, NeverSlower(factor))
    assert cli.main([*TARGETS, "--only", "one"]) == status
    out = capsys.readouterr().out
    assert "two thing" not in out
    assert met in out


@pytest.mark.slow
def test_a_run_is_resumed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measuring, "watch_others", lambda: lambda: None)
    two_targets(monkeypatch, NeverSlower(0.0))
    file = tmp_path / "it.json"
    given = [*TARGETS, "--json", str(file), "--resume"]
    assert cli.main([*given, "--only", "one"]) == 0
    first = BenchmarkReport.from_json(file.read_text())
    assert cli.main(given) == 0
    whole = BenchmarkReport.from_json(file.read_text())
    assert [group.title for group in whole.groups] == ["one thing", "two thing"]
    assert whole.groups[0] == first.groups[0]
    capsys.readouterr()
    first.machine["torch"] = "1.0"
    file.write_text(first.as_json())
    assert cli.main(given) == 2
    assert f"resume: the file's torch is 1.0, here {torch.__version__}" in capsys.readouterr().err


@pytest.mark.slow
def test_targets_run_as_they_are(capsys):
    assert cli.main([*TARGETS, "--only", "L=16 B=4 float32 auto"]) in (0, 3, 4)
    out = capsys.readouterr().out
    assert "empty calls" in out
    assert "forward float32 L=16 to 256 through auto" in out  # the median


@pytest.mark.slow
def test_one_thread_s_own_time(capsys):
    assert cli.main([*TINY, "--length", "32", "--backend", "auto", "--clock", "cpu", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["clock"] == "cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--only nonsense", "only: no target has the words nonsense"),
        ("--length 32", "targets: they have cases of their own, of which --only takes some"),
        ("--set sse17", "sse17"),
    ],
)
def test_what_is_wrong_with_targets_is_one_line(given, words, capsys):
    assert cli.main([*TARGETS, *given.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--length many", "length: expected a number of tokens as 1000, 4k or 4x, got 'many'"),
        ("--heads 2,x", "heads: expected int numbers separated by commas, got '2,x'"),
        ("--mask causal,", "mask: an entry is empty in 'causal,'"),
        ("--mask casual", "mask: expected full, causal, window:W"),
        ("--pass sideways", "stage must be one of"),
        ("--against sdpa,it", "against: expected sdpa, flex, dense, onnxruntime, openvino or none, got 'it'"),
        ("--clock sun", "clock must be one of wall, cpu"),
        ("--only one", "only: it is for --targets"),
        ("--resume", "resume: it is for --targets"),
        ("--plot it.pdf", "plot: expected a file that ends in .png or .svg, got it.pdf"),
        ("--json nowhere/it.json", "cannot write nowhere/it.json"),
        ("--rounds 0", "rounds: must be at least 1, got 0"),
        ("--threads 0", "threads must be at least 1, got 0"),
        ("--from nowhere.json", "--from nowhere.json: no such file; expected a file that --json wrote"),
        ("--set sse17", "sse17"),
    ],
)
def test_what_the_user_can_mend_is_one_line(given, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*TINY, "--length", "32", *given.split()]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert len(shown.err.splitlines()) == 1


def run_as_a_program(folder, *given):
    """The report of a run in a process of its own."""
    command = [sys.executable, "-m", "saccade", "bench", *given, "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return BenchmarkReport.from_json(done.stdout)


@pytest.mark.slow  # a process that imports torch
def test_it_runs_as_a_program(tmp_path):
    assert len(run_as_a_program(tmp_path, *TINY[1:], "--length", "32", "--backend", "auto").groups) == 1


@pytest.mark.slow  # compiles; and in a process of its own, because a compiler does not take a patched `torch.empty`
def test_flex_is_compiled_apart(tmp_path):
    given = "--length 128 --width 16 --mask window:9 --against flex --backend chunked"
    row = run_as_a_program(tmp_path, *TINY[1:7], *given.split()).rows[1]
    assert (row.contender, row.status, row.note) == ("FlexAttention", "measured", "")
    assert row.setup > 0
