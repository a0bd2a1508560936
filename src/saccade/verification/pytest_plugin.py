"""A pytest plugin, for those who ask for it: `-p saccade.verification.pytest_plugin`, or in a conftest.py
`pytest_plugins = ["saccade.verification.pytest_plugin"]`.

It gives the fixture `assert_attention_correct`, and turns each target of the ini option `saccade_targets` into tests,
one for each family of checks:

    [pytest]
    saccade_targets =
        src/model.py:SelfAttention embed_dim=64 num_heads=4 causal
        src/blocks.py:CrossAttention dim=48

Words after the target: NAME=VALUE, an argument of its constructor, and `causal` or `bidirectional`, what is promised.
"""

from __future__ import annotations

import ast
import functools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ._verify import assert_correct, verify
from .findings._finding import FAMILIES
from .report._report import Report
from .report._text import finding_as_text
from .subject._load import split


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "saccade_targets",
        "implementations of attention to verify: path/to/file.py:Name [NAME=VALUE ...] [causal]",
        type="linelist",
        default=[],
    )


@pytest.fixture
def assert_attention_correct() -> Callable[..., None]:
    """`saccade.verification.assert_correct`: fails with the report if a promise is broken."""
    return assert_correct


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for line in config.getini("saccade_targets"):
        named = shlex.split(line)[0]
        target = VerifiedTarget.from_parent(session, name=named, nodeid=named, line=line)
        if _is_asked_for(target.path, config):
            session.ihook.pytest_collectstart(collector=target)
            report = session.ihook.pytest_make_collect_report(collector=target)
            session.ihook.pytest_collectreport(report=report)  # the terminal counts what is collected
            items.extend(report.result)


def _is_asked_for(path: Path, config: pytest.Config) -> bool:
    """Whether pytest runs all, or names a folder or file that the target is in."""
    if config.args_source != pytest.Config.ArgsSource.ARGS:
        return True
    named = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return any(path == folder or folder in path.parents for folder in named)


class VerifiedTarget(pytest.Collector):
    """One implementation: it is verified once, when the first of its tests runs."""

    def __init__(self, *, line: str, **options: Any) -> None:
        super().__init__(**options)
        _, *words = shlex.split(line)
        try:
            self.path, thing = split(str(self.config.rootpath / self.name))
        except ValueError as error:
            raise pytest.UsageError(f"saccade_targets: {line}: {error}") from None
        self.target = f"{self.path}:{thing}" if thing else str(self.path)
        self.promised, self.arguments = _words(line, words)

    def collect(self) -> Iterator[Promises]:
        for family in FAMILIES:
            item = Promises.from_parent(self, name=family)
            if self.config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group(self.name))  # --dist loadgroup verifies it once
            yield item

    @functools.cached_property
    def report(self) -> Report:
        chosen = [item.name for item in self.session.items if item.parent is self]  # -k and -m have left some out
        return verify(self.target, self.promised, arguments=self.arguments, checks=chosen)


class BrokenPromise(Exception):
    """A promise is broken; the message is the report's."""


class Promises(pytest.Item):
    """The promises of one family of checks about a target."""

    parent: VerifiedTarget

    def runtest(self) -> None:
        report = self.parent.report
        findings = [finding for finding in report.findings if finding.family == self.name]
        errors = [finding_as_text(finding) for finding in findings if finding.severity == "error"]
        if errors:
            raise BrokenPromise("\n\n".join(errors))
        others = [finding_as_text(finding) for finding in findings]
        if others:
            self.add_report_section("call", "saccade", "\n\n".join(others))
        outcomes = [outcome for outcome in report.outcomes if outcome.family == self.name]
        if all(outcome.status != "passed" for outcome in outcomes):
            pytest.skip("; ".join(outcome.reason for outcome in outcomes) or "no check could be run")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, BrokenPromise | ValueError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.parent.path, None, f"{self.parent.name}: {self.name}"


def _words(line: str, words: list[str]) -> tuple[bool | None, dict[str, Any]]:
    """The promise and the constructor's arguments that follow a target."""
    promised: bool | None = None
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word in ("causal", "bidirectional"):
            promised = word == "causal"
        elif equals and name.isidentifier():
            try:
                arguments[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                arguments[name] = value
        else:
            raise pytest.UsageError(
                f"saccade_targets: {line}: expected NAME=VALUE, causal or bidirectional, not {word}"
            )
    return promised, arguments
