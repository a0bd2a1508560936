"""What a report looks like: as text, in colour, as JSON, JUnit and a page; whatever the target wrote into it."""

from __future__ import annotations

import html.parser
import json
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from saccade.verification import Finding, Location, Outcome, Report, as_json, as_junit, as_page, report_lines
from saccade.verification.findings._words import plain
from saccade.verification.report._text import fix_lines, is_code, verdict

LEAK = Finding(
    "causal-leak",
    "causal-leak",
    "error",
    "Output 3 changes by 0.12 when input 5, which comes later, changes",
    "In training the model reads the answer in its input.",
    'scores = scores.masked_fill(~mask, float("-inf"))',
    {"output": 3, "input": 5, "change": 0.12},
    Location("/home/me/model.py", 31, "att = F.softmax(att, dim=-1)", "forward"),
)
PADDED = Finding("padding", "padding", "warning", "An item that is all padding gives NaN", "A loss over it is NaN.")
KNOWS = Finding("order", "order", "note", "It knows the order of its input.", "Nothing.", "")
OUTCOMES = (
    Outcome("causal-leak", "causal-leak", "No output depends on a later input.", "failed", "", 0.31),
    Outcome("padding", "padding", "What is real does not depend on padding.", "passed", "", 0.2),
    Outcome("order", "order", "Attention by itself does not know the order of its input.", "passed", "", 0.1),
    Outcome("cache", "cache", "Steps give what the whole gives.", "n/a", "it has no cache", 0.0),
)
BROKEN_OFF = Outcome("scale", "scale", "Logits are scaled.", "n/a", "the check broke off with KeyError", 0.1)
UNMIXED = Finding("causal-blindness", "causal-blindness", "warning", "No output depends", evidence={"mixes": False})
REPORT = Report(
    "model.py:Attention",
    "forward(x) with x (batch, length, 64)",
    ("the model width is 64 (otherwise --embed-dim)",),
    True,
    (LEAK, PADDED, KNOWS),
    OUTCOMES,
    2.345,
    "hello\n",
)
RIGHT = replace(REPORT, findings=(), outcomes=OUTCOMES[1:], printed="")
# What a target may put into its errors, its name or its output: markup, all that XML forbids, what moves a cursor.
NASTY = "<script>alert(1)</script> & \"quoted\" 'single' ]]> {{ 7 * 7 }} [bold]"
NASTY += " \x00\x01\x08\x0b\x1b[31m\x1f\x7f\x9f \ufffe \ud800"
HOSTILE = Report(
    NASTY,
    NASTY,
    (NASTY,),
    None,
    (
        Finding("scale", "scale", "error", NASTY, NASTY, NASTY, {NASTY: NASTY}, Location(NASTY, 3, NASTY, NASTY)),
        Finding("scale", "scale", "note", NASTY),
    ),
    (Outcome("scale", "scale", NASTY, "failed", NASTY), Outcome("cache", "cache", NASTY, "n/a", NASTY)),
    1.0,
    NASTY,
)


# Text


def test_the_whole_text():
    assert str(REPORT) == (
        """\
model.py:Attention breaks a promise of attention: causal-leak.

called   forward(x) with x (batch, length, 64)
assumed  the model width is 64 (otherwise --embed-dim)
run      4 checks in 2.3 s

causal-leak  BROKEN   No output depends on a later input
padding      warning  What is real does not depend on padding
order        ok       Attention by itself does not know the order of its input
cache        n/a      it has no cache

error: Output 3 changes by 0.12 when input 5, which comes later, changes. [causal-leak]
    --> /home/me/model.py:31 in forward
  31 | att = F.softmax(att, dim=-1)
  why   In training the model reads the answer in its input.
  fix  scores = scores.masked_fill(~mask, float("-inf"))

warning: An item that is all padding gives NaN. [padding]
  why   A loss over it is NaN.

note: It knows the order of its input. [order]"""
    )


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (RIGHT, "No error found in model.py:Attention: 2 of 3 checks passed; 1 does not apply to it."),
        (
            replace(RIGHT, findings=(PADDED, KNOWS)),
            "No error found in model.py:Attention: 2 of 3 checks passed, with 1 warning and 1 note; 1 does not apply "
            "to it.",
        ),
        (replace(RIGHT, outcomes=OUTCOMES[1:2]), "No error found in model.py:Attention: 1 of 1 check passed."),
        (
            replace(RIGHT, findings=(UNMIXED,)),
            "No attention was seen in model.py:Attention: only checks that any layer can pass have passed.",
        ),
        (
            replace(RIGHT, outcomes=(*OUTCOMES[1:3], BROKEN_OFF)),
            "model.py:Attention could not be tested to the end: 1 check broke off, because of a defect in Saccade; "
            "2 of 3 checks passed.",
        ),
        (replace(RIGHT, outcomes=OUTCOMES[3:]), "None of the checks applies to model.py:Attention."),
        (replace(REPORT, outcomes=()), "No check could be run on model.py:Attention."),
        (
            replace(REPORT, findings=(LEAK, replace(LEAK, family="scale"), replace(LEAK, family="cache"))),
            "model.py:Attention breaks 3 promises of attention: causal-leak, scale and cache.",
        ),
    ],
)
def test_the_verdict_is_a_sentence(report, words):
    assert verdict(report) == words


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (RIGHT, ""),
        (replace(RIGHT, findings=(PADDED, KNOWS)), ""),
        (replace(RIGHT, findings=(UNMIXED,)), "no attention was seen"),
        (replace(RIGHT, outcomes=OUTCOMES[3:]), "no check applies"),
        (replace(RIGHT, outcomes=(*OUTCOMES[1:], BROKEN_OFF)), "1 check broke off"),
    ],
)
def test_a_report_is_good_only_where_attention_was_tested(report, words):
    assert report.untested == as_json(report)["untested"] == words
    assert report.ok == as_json(report)["ok"] == (words == "")


def test_lines_keep_to_the_width():
    long = replace(LEAK, message="word " * 60, effect="another " * 40, fix="more " * 50)
    for width in (60, 100):
        for line in report_lines(replace(REPORT, findings=(long,), assumed=("thing " * 40,)), width):
            assert len("".join(piece.text for piece in line)) <= width


def test_a_check_that_another_error_stopped_is_not_told_as_broken():
    crash = replace(LEAK, check="padding", family="robustness")
    stopped = Outcome("padding", "padding", "What is real ...", "failed", "it crashed")
    assert re.search(
        r"^padding  stopped  it crashed$", str(replace(REPORT, findings=(crash,), outcomes=(stopped,))), re.M
    )


def test_a_path_below_here_is_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = replace(LEAK, location=Location(str(tmp_path / "src" / "model.py"), 31, "x", "<module>"))
    assert "    --> src/model.py:31\n" in str(replace(REPORT, findings=(inside,)))


def test_a_comment_goes_above_code_that_is_too_long():
    assert list(fix_lines("a = b  # why", 80)) == ["a = b  # why"]
    assert list(fix_lines("a = b  # why", 8)) == ["# why", "a = b"]
    assert list(fix_lines("Say: a = b  # why", 8)) == ["Say: a = b  # why"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("scores = scores / math.sqrt(q.shape[-1])", True),
        ("k, v = kv.chunk(2, dim=-1)", True),
        ("scores *= scale", True),
        ("self.mask[:, :length] = True", True),
        ("nn.init.xavier_uniform_(self.weight)", True),
        ("return out", True),
        ("# before the softmax", True),
        ("Apply it to the weights: weights = self.drop(weights).", False),
        ("Fill with a value that the dtype can represent: scores.masked_fill(mask, float('-inf')).", False),
        ("Raise the limit.", False),
    ],
)
def test_code_is_told_from_sentences(line, expected):
    assert is_code(line) is expected


def test_colours_say_nothing_that_the_words_do_not():
    from rich.style import Style

    pieces = [piece for line in report_lines(REPORT) for piece in line]
    assert {piece.style for piece in pieces} >= {"error", "warning", "note", "ok", "bad", "n/a", "code", "fix"}
    for piece in pieces:
        Style.parse(piece.rich or "none")


def test_a_target_cannot_move_the_cursor():
    text = str(HOSTILE)
    assert not [letter for letter in text if not letter.isprintable() and letter != "\n"]
    assert "<script>alert(1)</script>" in text


# JSON


def test_json_has_names_that_stay():
    told = json.loads(json.dumps(as_json(REPORT), allow_nan=False))
    assert list(told) == [
        "format",
        "target",
        "ok",
        "untested",
        "called",
        "assumed",
        "causal",
        "seconds",
        "errors",
        "warnings",
        "notes",
        "findings",
        "checks",
        "printed",
    ]
    assert (told["format"], told["ok"], told["errors"], told["warnings"], told["notes"]) == (1, False, 1, 1, 1)
    assert told["seconds"] == 2.345
    assert told["findings"][0] == {
        "check": "causal-leak",
        "family": "causal-leak",
        "severity": "error",
        "message": LEAK.message,
        "effect": LEAK.effect,
        "fix": LEAK.fix,
        "evidence": {"output": 3, "input": 5, "change": 0.12},
        "location": {
            "path": "/home/me/model.py",
            "line": 31,
            "code": "att = F.softmax(att, dim=-1)",
            "function": "forward",
        },
        "example": [],
        "where": "",
    }
    assert told["findings"][1]["location"] is None
    assert told["checks"][3] == {
        "name": "cache",
        "family": "cache",
        "promise": "Steps give what the whole gives.",
        "status": "n/a",
        "reason": "it has no cache",
        "measured": True,
        "seconds": 0.0,
    }


def test_any_evidence_becomes_json():
    given = {
        3: torch.tensor([1.5, float("nan")]),
        "big": float("inf"),
        "set": {7},
        "pair": (1, None, True),
        "location": Location("a.py", 2, "x"),
        "type": torch.float16,
        "scalar": torch.tensor(5),
    }
    assert plain(given) == {
        "3": [1.5, "nan"],
        "big": "inf",
        "set": [7],
        "pair": [1, None, True],
        "location": {"path": "a.py", "line": 2, "code": "x", "function": ""},
        "type": "torch.float16",
        "scalar": 5,
    }


def test_anything_hostile_is_json():
    assert json.loads(json.dumps(as_json(HOSTILE)))["target"] == NASTY


# JUnit


def test_junit_has_a_case_for_each_check():
    root = ElementTree.fromstring(as_junit(REPORT).encode())
    assert (root.tag, root.get("name")) == ("testsuites", "saccade verify")
    (suite,) = root
    for element in (root, suite):
        assert [element.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "0", "1"]
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert list(cases) == ["causal-leak", "padding", "order", "cache"]
    failure = cases["causal-leak"].find("failure")
    assert (failure.get("message"), failure.get("type")) == (LEAK.message, "causal-leak")
    assert "scores = scores.masked_fill" in failure.text
    assert (cases["causal-leak"].get("file"), cases["causal-leak"].get("line")) == ("/home/me/model.py", "31")
    assert cases["causal-leak"].get("time") == "0.310"
    assert cases["cache"].find("skipped").get("message") == "it has no cache"
    assert "all padding gives NaN" in cases["padding"].find("system-out").text
    assert cases["padding"].find("failure") is None
    assert "hello" in suite.find("system-out").text


def test_junit_of_what_could_not_be_called_fails():
    broken = replace(LEAK, check="robustness", family="robustness", message="Nothing could be checked")
    root = ElementTree.fromstring(as_junit(replace(REPORT, findings=(broken,), outcomes=())).encode())
    assert root.get("failures") == "1"
    assert root.find("testsuite/testcase").get("name") == "call"


def test_junit_is_well_formed_whatever_comes():
    root = ElementTree.fromstring(as_junit(HOSTILE).encode())
    assert root.find("testsuite/testcase/failure").get("message").startswith('<script>alert(1)</script> & "quoted"')


# The page


class Tags(html.parser.HTMLParser):
    """Tags in order, whether they close, and all text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text, self.links = [], [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("href", "src", "action")]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_says_all():
    page = Tags(as_page(REPORT))
    assert page.open == []
    text = " ".join(page.text.split())
    for words in (
        verdict(REPORT),
        LEAK.message,
        LEAK.effect,
        LEAK.fix,
        "/home/me/model.py:31 in forward",
        LEAK.location.code,
        REPORT.called,
        REPORT.assumed[0],
        "it has no cache",
        "hello",
    ):
        assert " ".join(words.split()) in text, words
    assert page.tags.count("tr") == 1 + len(OUTCOMES)
    assert page.tags.count("article") == 3


@pytest.mark.parametrize("report", [REPORT, RIGHT, HOSTILE, replace(REPORT, outcomes=(), called="", assumed=())])
def test_the_page_is_one_file_that_fetches_and_runs_nothing(report):
    page = as_page(report)
    tags = Tags(page)
    assert not {"script", "iframe", "img", "object", "form"} & set(tags.tags)
    assert tags.links == ["data:,"]
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_the_page_escapes_what_the_target_says():
    page = as_page(HOSTILE)
    assert "<script>" not in page
    assert "{{ 7 * 7 }}" in page and "49" not in Tags(page).text
    page.encode("utf-8")


def test_the_page_can_be_read_by_everybody():
    page = as_page(REPORT)
    assert '<html lang="en">' in page
    assert '<meta name="color-scheme" content="light dark">' in page
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.count('scope="row"') == len(OUTCOMES)


def test_a_phone_shows_the_whole_width():
    """Nothing keeps the page as wide as its longest text: Chromium measures 375 of 375 pixels, and 320 of 320."""
    css = re.search(r"<style>\s*(\.saccade-verify \{.*?)</style>", as_page(REPORT), re.DOTALL)[1]
    wide, narrow = css.split("@media (max-width: 34rem) {")
    assert not re.search(r"(?<!-)width: max-content", css)
    kept = re.findall(r"([^{}]*)\{[^{}]*white-space: nowrap", wide)
    assert [value.strip() for value in kept] == [
        ".saccade-verify tbody th, .saccade-verify thead th",
        ".saccade-verify td.result",
    ]
    assert re.search(r"tbody th \{[^{}]*white-space: normal", narrow)


def test_a_notebook_shows_a_part_of_a_page():
    shown = REPORT._repr_html_()
    assert "<html" not in shown and "<main" not in shown
    rules = re.search(r"<style>(.*?)</style>", shown, re.S)[1]
    selectors = [one.strip() for rule in re.findall(r"([^{}]+)\{", rules) for one in rule.split(",")]
    assert all(one.startswith((".saccade-verify", "@media")) for one in selectors), selectors  # the notebook's stay


def test_in_a_list_a_report_is_one_line():
    assert repr(REPORT).startswith(f"<Report on {REPORT.target}: ") and "\n" not in repr(REPORT)
    assert len(repr(REPORT)) < 300


def test_each_promise_fits_its_row_of_the_table():
    """Beside the longest name, "causal-blindness", and the longest result, "warning"."""
    from saccade.verification.checks import CHECKS

    room = 100 - len("causal-blindness  warning  ")
    assert [subject.name for subject in CHECKS if len(subject.promise.rstrip(".")) > room] == []


@pytest.mark.parametrize(
    ("check", "family", "row"),
    [
        ("dtype and device", "robustness", "dtype and device"),
        ("compile", "robustness", "compile"),
        ("robustness", "robustness", "robustness"),
        ("padding", "robustness", "robustness"),
    ],
)
def test_header_tag_and_row_say_the_same_name(check: str, family: str, row: str):
    found = replace(LEAK, check=check, family=family)
    rows = tuple(
        Outcome(name, "robustness", "It does.", "failed" if name == row else "passed")
        for name in ("robustness", "dtype and device", "compile")
    )
    lines = str(replace(REPORT, findings=(found,), outcomes=rows)).splitlines()
    assert lines[0].endswith(f"breaks a promise of attention: {row}.")
    assert [line.split("  ")[0] for line in lines if "BROKEN" in line] == [row]
    assert f"[{row}]" in "\n".join(lines)
