"""`saccade.verified`: tests and fixtures that return a stack."""

from __future__ import annotations

import pytest
from torch.nn import functional

import saccade
from saccade.verification import StackError

pytest_plugins = ["pytester"]

THEIRS = """
import pytest
import saccade
import torch
from stacks.dense import Dense

def joined(documents):
    return torch.tensor([sum(documents, [])])

@pytest.fixture
@saccade.verified(causal=True)
def model():
    return Dense()

@pytest.fixture
@saccade.verified
def packed():
    return {"model": Dense(), "pack": joined}

@saccade.verified
def test_right(model):
    assert isinstance(model, Dense)
    return model

@saccade.verified()
def test_packs(model):
    return {"model": model, "pack": joined}

def test_with_a_wrong_fixture(packed): ...

@saccade.verified
def test_returns_nothing(): ...
"""


def test_tests_and_fixtures_fail_with_the_report_under_pytest_alone(pytester):
    """Also what the tests return: pytest warns of anything but None."""
    pytester.makepyfile(THEIRS)
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "error::pytest.PytestWarning"
    )
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(["*Document 1 attends to document 0 of its pack*"])
    result.stdout.fnmatch_lines(["*ValueError: test_returns_nothing: expected a dict with model*; got no model"])
    assert "report_on" not in result.stdout.str().partition("test_returns_nothing")[0]  # the report, no code


def test_a_stack_that_nothing_can_test_does_not_pass():
    @saccade.verified
    def test_pooled():
        return lambda input_ids: functional.one_hot(input_ids, 7).float().mean(1)

    with pytest.raises(StackError, match="expected .*, width"):
        test_pooled()


@pytest.mark.slow
def test_the_command_verifies_a_decorated_factory_once(tmp_path):
    """It prints the report; the decorator would raise it."""
    from saccade.verification._verify_stack import verify_made

    (tmp_path / "stack.py").write_text(THEIRS.replace("@pytest.fixture", "").replace("def packed", "def make"))
    report = verify_made(f"{tmp_path / 'stack.py'}:make")
    assert [finding.probe for finding in report.errors] == ["packing"]
