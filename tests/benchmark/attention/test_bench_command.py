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
    Contender,
    DenseAttention,
    measuring,
)

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
    assert report.settings["command"].startswith("saccade")
    assert report.machine["threads"] == 1
    assert report.machine["torch"] == torch.__version__
    assert {row.status for row in report.rows} == {"measured"}


@pytest.mark.slow
def test_files_are_written_and_shown_again(tmp_path, capsys):
    files = {kind: tmp_path / f"it.{kind}" for kind in ("json", "svg")}
    given = ["--json", str(files["json"]), "--plot", str(files["svg"])]
    assert cli.main([*TINY, *given, "--length", "32,64", "--backend", "auto", "--against", "none"]) == 0
    first = capsys.readouterr().out
    read = json.loads(files["json"].read_text())
    assert [group["rows"][0]["case"]["length_k"] for group in read["groups"]] == [32, 64]
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--length many", "length: expected a number of tokens as 1000, 4k or 4x, got 'many'"),
        ("--heads 2,x", "heads: expected int numbers separated by commas, got '2,x'"),
        ("--mask causal,", "mask: an entry is empty in 'causal,'"),
        ("--mask casual", "mask: expected full, causal, window:W"),
        ("--pass sideways", "stage must be one of"),
        ("--against sdpa,it", "against: expected sdpa, flex, dense or none, got 'it'"),
        ("--plot it.pdf", "plot: expected a file that ends in .png or .svg, got it.pdf"),
        ("--json nowhere/it.json", "cannot write nowhere/it.json"),
        ("--rounds 0", "rounds: must be at least 1, got 0"),
        ("--threads 0", "threads must be at least 1, got 0"),
        ("--from nowhere.json", "--from nowhere.json: no such file; expected a file that --json wrote"),
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
