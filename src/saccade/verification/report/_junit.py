"""The report as JUnit XML, which continuous integration shows: a test case for each check."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ..findings._finding import Finding, Outcome
from ..findings._results import Results
from ._text import finding_as_text, label, verdict

# What XML 1.0 cannot hold, whatever the escape: most control characters, halves of surrogate pairs, two non-characters.
_IMPOSSIBLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(report: Results) -> str:
    """A report as JUnit XML. Broken checks are failures, inapplicable ones are skipped, warnings and notes are output.

    Example:
        >>> import torch, saccade
        >>> report = saccade.verify(torch.nn.functional.scaled_dot_product_attention, checks=["scale"], isolated=False)
        >>> print(saccade.verification.as_junit(report))
        <?xml version="1.0" encoding="utf-8"?>
        <testsuites name="saccade verify" tests="1" failures="0" ...
    """
    cases = [_case(outcome, report) for outcome in report.outcomes]
    named = {outcome.name for outcome in report.outcomes}
    others = [finding for finding in report.findings if finding.check not in named]
    stopped = [finding for finding in others if finding.severity == "error"]
    if stopped:  # it could not even be imported or called
        cases.append(_failing("call", report, stopped, 0.0))
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
        "time": f"{report.seconds:.3f}",
    }
    root = _element("testsuites", {"name": "saccade verify", **counts})
    suite = _element("testsuite", {"name": report.target, **counts})
    suite.extend(cases)
    said = "\n\n".join(
        [verdict(report), *(finding_as_text(finding) for finding in others if finding.severity != "error")]
    )
    suite.append(_element("system-out", {}, f"{said}\n\n{report.printed}".rstrip()))
    root.append(suite)
    ElementTree.indent(root, " ")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _case(outcome: Outcome, report: Results) -> ElementTree.Element:
    own = [finding for finding in report.findings if finding.check == outcome.name]
    errors = [finding for finding in own if finding.severity == "error"]
    case = _failing(outcome.name, report, errors, outcome.seconds)
    if outcome.status == "n/a":
        case.append(_element("skipped", {"message": outcome.reason}))
    rest = [finding_as_text(finding) for finding in own if finding.severity != "error"]
    if rest:
        case.append(_element("system-out", {}, "\n\n".join(rest)))
    return case


def _failing(name: str, report: Results, errors: list[Finding], seconds: float) -> ElementTree.Element:
    case = _element("testcase", {"classname": report.target, "name": name, "time": f"{seconds:.3f}"})
    if errors:  # readers expect one failure for a case
        text = "\n\n".join(finding_as_text(error) for error in errors)
        case.append(_element("failure", {"message": errors[0].message, "type": label(errors[0])}, text))
        location = errors[0].location
        if location is not None:
            case.set("file", _possible(location.path))
            case.set("line", str(location.line))
    return case


def _element(tag: str, attributes: dict[str, str], text: str = "") -> ElementTree.Element:
    element = ElementTree.Element(tag, {name: _possible(value) for name, value in attributes.items()})
    element.text = _possible(text) or None
    return element


def _possible(text: str) -> str:
    return _IMPOSSIBLE.sub("?", text)
