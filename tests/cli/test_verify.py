"""`saccade verify`, from the command line to its exit status and the files it writes."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

from saccade import cli
from saccade.cli import verify as command
from saccade.verification import Check, Finding, Hints, Limits, Promise
from saccade.verification.checks import CHECKS

THEIRS = """
import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self, width, heads=1, masked=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.masked = masked

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / x.shape[-1] ** 0.5
        if self.masked:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return self.out(scores.softmax(-1) @ v)


def adapter(target, x):
    return target(x)
"""


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    return path


def run(capsys, *arguments):
    status = cli.main(["verify", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def seen(monkeypatch):
    """What the command asks for, without doing it."""
    asked = []

    def verify(target, **options):
        asked.append((target, options))
        raise ValueError("asked")

    monkeypatch.setattr("saccade.verification.verify", verify)
    return asked


def test_a_broken_promise_is_exit_status_1(capsys):
    chosen = ["--causal", "--only", "causal-leak", "--only", "order"]
    status, out, err = run(capsys, "theirs.py:Causal", "--arg", "width=24", "--arg", "masked=False", *chosen)
    assert (status, err) == (1, "")
    assert out.startswith("theirs.py:Causal breaks a promise of attention: causal-leak.\n")
    assert re.search(r"^error: .*comes later.*", out, re.M)
    assert "  fix  " in out
    assert "\x1b" not in out  # piped: no colours


def test_kept_promises_are_exit_status_0(capsys):
    status, out, err = run(capsys, "theirs.py:Causal", "--arg", "width=24", "--only", "causal-leak", "--only", "mixing")
    assert (status, err) == (0, ""), out
    assert "2 of 2 checks passed." in out
    assert "it is causal: no output depends on a later input (otherwise --bidirectional)" in out


def test_a_full_disk_takes_the_files_and_not_the_report(capsys, monkeypatch):
    def fail(path, content):
        raise ValueError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr("saccade.viewer.write_whole", fail)
    wanted = ["--arg", "width=24", "--only", "mixing", "--junit", "report.xml"]
    status, out, err = run(capsys, "theirs.py:Causal", *wanted)
    assert "1 of 1 check passed." in out and "report.xml" not in out
    assert status == 2 and "No space left on device" in err


def test_json_is_all_that_is_printed(capsys):
    status, out, err = run(capsys, "theirs.py:Causal", "--arg", "width=24", "--only", "causal-leak", "--json")
    told = json.loads(out)
    assert (status, err, told["ok"], told["causal"]) == (0, "", True, True)
    assert [(one["name"], one["status"]) for one in told["checks"]] == [("causal-leak", "passed")]


def test_a_page_and_junit_are_written_and_may_be_written_again(capsys, tmp_path):
    command_line = ["theirs.py:Causal", "--arg", "width=24", "--bidirectional", "--only", "causal-leak"]
    for _ in range(2):
        _, out, _ = run(capsys, *command_line, "--out", "page.html", "--junit", "report.xml")
        assert out.endswith(f"JUnit  {tmp_path / 'report.xml'}\nPage   {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert ElementTree.parse(tmp_path / "report.xml").getroot().get("tests") == "1"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "page.html",
        "report.xml",
        "theirs.py",
    ]


def test_colours_are_for_terminals_and_not_for_those_who_say_no(capsys, monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    def printed():
        terminal = Terminal(io.BytesIO(), encoding="utf-8")
        monkeypatch.setattr(sys, "stdout", terminal)
        cli.main(["verify", "theirs.py:Causal", "--arg", "width=24", "--only", "causal-leak"])
        terminal.flush()
        return terminal.buffer.getvalue().decode()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\dm", printed())


# What is asked for


def test_every_option_reaches_verify(capsys, seen):
    run(
        capsys,
        "theirs.py:Causal",
        "--arg",
        "width=24",
        "--arg",
        "name=plain words",
        "--arg",
        "sizes=(1, 2)",
        "--causal",
        "--window",
        "3",
        "--no-positions",
        "--scale",
        "0.5",
        "--mask-meaning",
        "ignore",
        "--embed-dim",
        "24",
        "--num-heads",
        "2",
        "--form",
        "self",
        "--layout",
        "LBD",
        "--mask",
        "attn_mask",
        "--skip",
        "model",
        "--skip",
        "cache",
        "--time-limit",
        "7",
        "--memory-limit",
        "2.5",
    )
    ((target, options),) = seen
    assert target == "theirs.py:Causal"
    assert options.pop("progress")
    assert options == {
        "embed_dim": 24,
        "num_heads": 2,
        "arguments": {"width": 24, "name": "plain words", "sizes": (1, 2)},
        "how": Hints("self", "LBD", 24, 2, "attn_mask"),
        "promise": Promise(True, 3, False, 0.5, "ignore"),
        "checks": [check for check in CHECKS if check.name not in ("model", "cache")],
        "limits": Limits(7.0, 2.5),
    }


def test_an_adapter_is_named_and_loaded_in_the_child(capsys):
    status, out, _ = run(
        capsys,
        "theirs.py:Causal",
        "--arg",
        "width=24",
        "--embed-dim",
        "24",
        "--adapter",
        "theirs.py:adapter",
        "--only",
        "causal-leak",
    )
    assert status == 0, out
    assert "it is called through the adapter" in out


def test_what_the_user_can_mend_is_one_line_and_exit_status_2(capsys, tmp_path):
    (tmp_path / "notes.html").write_text("mine")
    (tmp_path / "folder.html").mkdir()
    cases = [
        (["nowhere.py:Causal"], "TARGET nowhere.py:Causal: no such file or folder; expected path/to/file.py:NAME"),
        (["theirs.py:Casual"], "there is no Casual in it; it holds Causal"),
        (["theirs"], 'expected "path/to/file.py:Name"'),
        (["theirs.py:Causal", "--arg", "width"], "--arg width: expected NAME=VALUE, such as embed_dim=64"),
        (["theirs.py:Causal", "--arg", "a=1", "--arg", "a=2"], "--arg a came twice"),
        (["theirs.py:Causal", "--only", "causal"], "--only causal: there is no such check; did you mean causal-leak?"),
        (["theirs.py:Causal", "--only", "xyz"], "--only xyz: there is no such check; expected one of scale"),
        (["theirs.py:Causal", "--only", "scale", "--skip", "scale"], "leave no check to run"),
        (["theirs.py:Causal", "--out", "page.txt"], "--out page.txt: the page is written to an .html"),
        (["theirs.py:Causal", "--out", "notes.html"], "notes.html exists and was not made by Saccade"),
        (["theirs.py:Causal", "--out", "folder.html"], "it is a folder"),
        (["theirs.py:Causal", "--out", "no/page.html"], "does not exist"),
        (["theirs.py:Causal", "--junit", "theirs.py"], "theirs.py exists and was not made by Saccade"),
        (["theirs.py:Causal", "--junit", "theirs.py", "--force"], "theirs.py is the file that is verified"),
        (["theirs.py:Causal", "--junit", "a.html", "--out", "a.html"], "is the file of both --junit and --out"),
        (["theirs.py:Causal", "--time-limit", "0"], "limits: seconds is 0"),
        (["theirs.py:Causal", "--form", "selfie"], "selfie"),
    ]
    for arguments, words in cases:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, ""), arguments
        assert words in err and err.count("\n") == 1 and err.startswith("saccade: error: "), (arguments, err)
    assert (tmp_path / "notes.html").read_text() == "mine"
    assert (tmp_path / "theirs.py").read_text() == THEIRS


def test_nothing_is_run_where_a_file_cannot_be_written(capsys, seen):
    assert run(capsys, "theirs.py:Causal", "--out", "no/page.html")[0] == 2
    assert seen == []


def test_what_remains_open_is_listed_with_the_options_that_decide(capsys, theirs):
    theirs.write_text(THEIRS + "\n\nclass Other(Causal):\n    pass\n")
    status, out, err = run(capsys, "theirs.py")
    assert (status, out) == (2, "")
    assert err == textwrap.dedent("""\
        saccade: error: target theirs.py: several things in it could be meant
        What decides it:
          theirs.py:Causal  class
          theirs.py:Other   class
        """)
    status, out, err = run(capsys, "theirs.py", "--json")
    assert (status, err) == (2, "")
    assert json.loads(out)["candidates"][1] == {"reading": "class", "option": "theirs.py:Other"}


def test_a_file_that_fails_is_a_report(capsys, theirs):
    theirs.write_text("import torch\n\nraise RuntimeError('no')\n")
    status, out, err = run(capsys, "theirs.py:Causal")
    assert (status, err) == (1, "")
    assert out.startswith("No check could be run on theirs.py:Causal.\n")
    assert "error: No check could be run: importing it failed. RuntimeError: no. [robustness]\n" in out
    assert "   --> theirs.py:3\n  3 | raise RuntimeError('no')\n" in out


def test_a_crash_is_a_finding_and_exit_status_1(capsys, theirs):
    theirs.write_text("import os\n\ndef attend(q, k, v):\n    os.abort()\n")
    status, out, _ = run(capsys, "theirs.py:attend")
    assert status == 1
    assert "aborted the process" in out
    assert "--> theirs.py:4 in attend" in out


def test_progress_is_shown_on_terminals_only(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    cli.main(["verify", "theirs.py:Causal", "--arg", "width=24", "--only", "causal-leak"])
    assert "loading" in terminal.getvalue() or "causal-leak" in terminal.getvalue()


def test_help_says_that_code_is_run_and_what_the_status_means(capsys):
    status, out, _ = run(capsys, "--help")
    text = " ".join(out.split())
    assert status == 0
    assert "This runs the code that you name, as pytest does" in text
    assert "nothing is fetched" in text
    assert "0 no errors; 1 errors, or no attention could be tested; 2" in text
    for check in CHECKS:
        assert " ".join(check.name.split()) in " ".join(text.split())


def test_families_are_those_of_verification():
    assert command.CHECKS.split(", ") == [check.name for check in CHECKS]


def test_every_option_that_a_report_names_exists(capsys):
    package = Path(command.__file__).parents[1] / "verification"
    named = {
        option
        for path in package.rglob("*.py")
        if path.name != "pytest_plugin.py"
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text(encoding="utf-8"))
    }
    _, out, _ = run(capsys, "--help")
    assert named >= {"--layout", "--embed-dim", "--mask-meaning"}
    assert {option for option in named if option not in out} == set()


def test_seconds_of_every_check_are_told(capsys, monkeypatch):
    def slow(subject):
        import time

        time.sleep(0.2)
        yield Finding("scale", "scale", "note", "slow")

    monkeypatch.setattr("saccade.verification.checks.CHECKS", (Check("scale", "scale", "", "", "", slow),))
    _, out, _ = run(capsys, "theirs.py:Causal", "--arg", "width=24", "--json", "--only", "scale")
    told = json.loads(out)
    assert 0.2 <= told["checks"][0]["seconds"] <= told["seconds"]


STACK = """
from stacks.dense import Dense


def right():
    return Dense()


def crashing():
    import ctypes

    return {"model": Dense(), "decode": lambda tokens, state: ctypes.string_at(0)}


def hanging():
    import time

    return {"model": Dense(), "decode": lambda tokens, state: time.sleep(1000)}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), [("crashing", "crashed"), ("hanging", "did not finish")])
def test_a_stack_that_ends_the_process_is_a_finding_and_the_other_probes_go_on(tmp_path, capsys, name, words):
    (tmp_path / "stack.py").write_text(STACK)
    ended, out, _ = run(capsys, f"stack.py:{name}", "--json", "--time-limit", "9")
    told = json.loads(out)
    (finding,) = told["findings"]
    assert (ended, words in finding["message"], "'cache'" in finding["message"]) == (1, True, True)
    statuses = {outcome["name"]: outcome["status"] for outcome in told["checks"]}
    assert statuses.pop("cache") == "failed" and set(statuses.values()) == {"passed", "n/a"}


def test_options_of_modules_are_usage_errors_of_stacks(tmp_path, capsys):
    (tmp_path / "stack.py").write_text(STACK)
    status, _, err = run(capsys, "stack.py:right", "--form", "self")
    assert (status, "--form" in err) == (2, True)
