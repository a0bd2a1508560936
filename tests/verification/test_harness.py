"""The harness judges reports as the page of planted faults says that it does."""

from __future__ import annotations

import sys

import harness
import pytest
from wrong.fault import TEXTBOOK, Fault

from saccade.verification import Check, Finding, Location, Reading, Report
from saccade.verification.checks import CHECKS
from saccade.verification.running._run import run_check
from saccade.verification.subject._subject import Subject

WRONG_LINE = "scores = torch.matmul(q, k.transpose(-2, -1))"
NO_SCALE = Fault(
    "no scale", ("scale", "softmax"), TEXTBOOK, f"{WRONG_LINE} / math.sqrt(d_k)", WRONG_LINE, "does not scale"
)


def finding(family, severity="error", code=""):
    return Finding(family, family, severity, "something", location=Location("file.py", 3, code) if code else None)


def judged(*findings, fault=NO_SCALE):
    return harness.judge(fault, Report("target", "called", (), None, findings, ()))


def test_an_error_of_a_fitting_family_names_it():
    assert judged(finding("scale")) == harness.Verdict(True, "scale", (), False)
    assert judged(finding("softmax"), finding("scale")).family == "scale"
    assert not judged(finding("padding")).named
    assert not judged(finding("scale", "warning")).named


def test_a_convention_is_named_by_a_warning():
    convention = Fault("c", ("padding",), TEXTBOOK, "d_k = q.size(-1)", "d_k = 3", "a convention", severity="warning")
    assert judged(finding("padding", "warning"), fault=convention).right


def test_every_other_error_counts_and_two_are_allowed():
    others = [finding(family) for family in ("softmax", "mixing")]
    assert judged(finding("scale"), *others).right
    assert judged(finding("scale"), *others).others == ("softmax", "mixing")
    assert not judged(finding("scale"), *others, finding("scale")).right
    assert judged(finding("scale"), finding("order", "note")).others == ()


def test_a_check_that_broke_off_is_no_result():
    broken = Check("order", "order", "", "", "", iter)  # a subject is no iterable
    found = run_check(broken, Subject(abs, Reading("self", "BLD", 7))).findings
    with pytest.raises(AssertionError, match="broke off with TypeError"):
        judged(finding("scale"), *found)


def test_the_line_is_the_one_that_was_changed():
    assert NO_SCALE.to_blame() == (WRONG_LINE,)
    assert judged(finding("scale", code=WRONG_LINE)).line
    assert judged(finding("scale", code="values = torch.matmul(attention, v)")).line is False
    missing = Fault("m", ("scale",), TEXTBOOK, "    d_k = q.size(-1)\n", "", "a line is missing", line="")
    assert judged(finding("scale"), fault=missing).line is None


def test_a_change_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match=r"twice: 'q' stands \d+ times in textbook_function.py, not once"):
        _ = Fault("twice", ("scale",), TEXTBOOK, "q", "k", "").source


def test_what_is_loaded_is_a_file_until_it_is_left():
    before = set(sys.modules)
    with harness.loaded("def f():\n    return 3\n", "some_file") as names:
        assert names["f"]() == 3
        path = names["__file__"]
        assert path.endswith("some_file.py")
    assert set(sys.modules) == before
    with pytest.raises(FileNotFoundError):
        open(path).close()


def test_without_compile_leaves_out_only_what_compiles_and_puts_it_back():
    from saccade.verification import checks

    with harness.without_compile():
        assert [one for one in CHECKS if one not in checks.CHECKS] == [one for one in CHECKS if "compile" in one.name]
    assert checks.CHECKS is CHECKS
