"""The pytest plugin: targets of the configuration as tests, and the fixture."""

from __future__ import annotations

import textwrap

import pytest

# Known here, so that they stay what they are when an inner run of pytest, in this process, forgets what it imported.
import saccade.verification.pytest_plugin  # noqa: F401
from saccade.verification.checks import CHECKS

pytest_plugins = ["pytester"]

LEAK = """
import torch
from torch import nn

class Right(nn.Module):
    def __init__(self, width, causal=True):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.causal = causal

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ v

class Leaks(Right):
    def __init__(self, width):
        super().__init__(width, causal=False)
"""
INI = """
[pytest]
addopts = -p saccade.verification.pytest_plugin -p no:cacheprovider -p no:xdist -p no:hypothesispytest
filterwarnings = ignore:Module already imported
saccade_targets =
"""


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch):
    """Without those that load compilers: what the plugin does is the same."""
    left = [check for check in CHECKS if check.name not in ("compile", "dropout", "gradients")]
    monkeypatch.setattr("saccade.verification.checks.CHECKS", left)


@pytest.fixture
def project(pytester):
    pytester.makepyfile(theirs=LEAK)

    def made(*targets):
        pytester.makeini(INI + "".join(f"    {one}\n" for one in targets))
        return pytester

    return made


def outcomes(result):
    """The word of each test, by its name."""
    lines = [line.split() for line in result.outlines if "::" in line and "%" in line]
    return {line[0].partition("::")[2]: line[1] for line in lines}


def test_each_family_is_a_test_and_a_broken_one_fails(project):
    result = project("theirs.py:Leaks width=24 causal").runpytest_inprocess("-v")
    seen = outcomes(result)
    assert len(seen) == 15
    assert seen["causal-leak"] == "FAILED"
    assert [name for name, word in seen.items() if word == "FAILED"] == ["causal-leak"]
    assert seen["model"] == "SKIPPED"
    assert seen["mixing"] == "PASSED"
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*theirs.py:Leaks: causal-leak*", "error: *later*"])
    assert "Traceback" not in result.stdout.str()


def test_right_ones_pass_and_can_be_chosen(project):
    result = project("theirs.py:Right width=24 causal").runpytest_inprocess("-v", "-k", "causal-leak or mixing")
    assert outcomes(result) == {"causal-leak": "PASSED", "mixing": "PASSED"}


def test_a_run_of_one_file_leaves_targets_elsewhere_out(project):
    tester = project("theirs.py:Right width=24")
    tester.makepyfile(test_one="def test_one(): pass")
    assert outcomes(tester.runpytest_inprocess("-v", "test_one.py")) == {"test_one": "PASSED"}
    chosen = tester.runpytest_inprocess("theirs.py", "-k", "mixing", "--collect-only", "-q")
    chosen.stdout.fnmatch_lines(["theirs.py:Right::mixing", "1/15 tests collected*"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nowhere.py:Right", "there is no file"),
        ("theirs.py:Right width", "expected NAME=VALUE, causal or bidirectional, not width"),
    ],
)
def test_what_cannot_be_is_a_usage_error(project, line, words):
    result = project(line).runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*saccade_targets: {line}: *{words}*"])


def test_a_target_that_cannot_be_called_says_so_in_its_tests(project):
    result = project("theirs.py:Missing").runpytest_inprocess("-k", "mixing")
    result.stdout.fnmatch_lines(["*there is no Missing in it; it holds Right, Leaks*"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.slow
def test_the_fixture_fails_with_the_report(project):
    tester = project()
    tester.makepyfile(
        test_theirs=textwrap.dedent("""
            import theirs

            def test_right(assert_attention_correct):
                assert_attention_correct(theirs.Right(24), True, checks=["causal-leak"])

            def test_leaks(assert_attention_correct):
                assert_attention_correct(theirs.Leaks(24), True, checks=["causal-leak"])
        """)
    )
    result = tester.runpytest_inprocess("-v")
    assert outcomes(result) == {"test_right": "PASSED", "test_leaks": "FAILED"}
    result.stdout.fnmatch_lines(["*Leaks breaks a promise of attention: causal-leak.*"])


def test_nothing_is_loaded_unasked(pytester):
    pytester.makepyfile(
        "def test(request): assert not request.config.pluginmanager.hasplugin('saccade.verification.pytest_plugin')"
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
