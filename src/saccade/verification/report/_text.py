"""The report as lines of text: first the findings, then every check. A terminal colours the same lines."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...support._numbers import counted, joined
from ..findings._finding import Finding, Location, Outcome
from ..findings._results import Results
from ..findings._words import shown_path

WIDTH = 100

# As rich names them; without colours the words alone say everything.
_STYLES = {
    "": "",
    "error": "bold red",
    "warning": "bold yellow",
    "note": "bold cyan",
    "ok": "green",
    "bad": "bold red",
    "n/a": "dim",
    "quiet": "dim",
    "title": "bold",
    "code": "bold",
    "fix": "green",
    "path": "blue",
}


class StyledText(NamedTuple):
    """A run of text and its style, a key of `_STYLES`."""

    text: str
    style: str = ""

    @property
    def rich(self) -> str:
        """The style in rich's notation."""
        return _STYLES[self.style]


Line = tuple[StyledText, ...]


def as_text(report: Results, width: int = WIDTH) -> str:
    """The whole report without colours."""
    return _joined_lines(report_lines(report, width))


def finding_as_text(finding: Finding) -> str:
    """One finding without colours."""
    return _joined_lines(_clean(_finding(finding, WIDTH)))


def report_lines(report: Results, width: int = WIDTH) -> Iterator[Line]:
    """The report line by line, each at most `width` columns wide where words allow it.

    A line is a tuple of `StyledText`.
    """
    return _clean(_lines(report, width))


def _clean(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines without control characters, which a target's errors may hold and which move a terminal's cursor."""
    for line in lines:
        yield tuple(
            StyledText("".join(character if character.isprintable() else "?" for character in text), style)
            for text, style in line
        )


def _lines(report: Results, width: int) -> Iterator[Line]:
    yield from _filled(
        (StyledText(verdict(report), "title" if report.ok else "error" if report.errors else "warning"),), "", "", width
    )
    if report.called or report.assumed:
        yield ()
        yield from _how_called(report, width)
    if report.outcomes:
        yield ()
        yield from _table(report, width)
    for finding in report.findings:
        yield ()
        yield from _finding(finding, width)


def _joined_lines(lines: Iterable[Line]) -> str:
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


def verdict(report: Results) -> str:
    """The report in a sentence."""
    counts = {
        status: sum(outcome.status == status for outcome in report.outcomes) for status in ("passed", "failed", "n/a")
    }
    errors = list(dict.fromkeys(label(error) for error in report.errors))
    if not report.outcomes and errors:
        return f"No check could be run on {report.target}."
    if errors:
        promises = "a promise" if len(errors) == 1 else f"{len(errors)} promises"
        return f"{report.target} breaks {promises} of attention: {joined(errors)}."
    if "broke off" in report.untested:
        return (
            f"{report.target} could not be tested to the end: {report.untested}, because of a defect in Saccade; "
            f"{counts['passed']} of {counted(len(report.outcomes), 'check')} passed."
        )
    if not counts["passed"]:
        return f"None of the checks applies to {report.target}."
    if report.untested:
        return f"No attention was seen in {report.target}: only checks that any layer can pass have passed."
    others = {kind: sum(finding.severity == kind for finding in report.findings) for kind in ("warning", "note")}
    also = joined([counted(count, kind) for kind, count in others.items() if count])
    passed = f"{counts['passed']} of {counted(len(report.outcomes), 'check')} passed{f', with {also}' if also else ''}"
    return f"No error found in {report.target}: {passed}{_left_out(report.outcomes)}."


def _left_out(outcomes: Sequence[Outcome]) -> str:
    """ "; 3 do not apply to it, and 2 could not be measured: scale and mixing"."""
    open_ones = [outcome.name for outcome in outcomes if outcome.status == "n/a" and not outcome.measured]
    apply = sum(outcome.status == "n/a" for outcome in outcomes) - len(open_ones)
    words = [f"{apply} {'does' if apply == 1 else 'do'} not apply to it"] if apply else []
    words += [f"{len(open_ones)} could not be measured: {joined(open_ones)}"] if open_ones else []
    return f"; {', and '.join(words)}" if words else ""


def label(finding: Finding) -> str:
    """The row of a finding: its check's name, or its family if that is not the check's own."""
    from ..checks import CHECKS

    own = any(check.name == finding.check and check.family == finding.family for check in CHECKS)
    return finding.check if own else finding.family


def place(location: Location) -> str:
    """ "model.py:31 in forward"."""
    where = f"{shown_path(location.path)}:{location.line}"
    named = location.function and not location.function.startswith("<")
    return f"{where} in {location.function}" if named else where


# How it was called


def _how_called(report: Results, width: int) -> Iterator[Line]:
    if report.called:
        yield from _filled((StyledText(report.called),), "called   ", " " * 9, width)
    for at, assumed in enumerate(report.assumed):
        yield from _filled((StyledText(assumed),), " " * 9 if at else "assumed  ", " " * 9, width)
    if report.outcomes:
        checks = counted(len(report.outcomes), "check")
        yield from _filled((StyledText(f"{checks} in {report.seconds:.1f} s", "quiet"),), "run      ", " " * 9, width)


# The table


def _table(report: Results, width: int) -> Iterator[Line]:
    """A row for each check: what was promised, or why the check does not apply."""
    wide = max(len(row.name) for row in report.outcomes)
    for outcome in report.outcomes:
        word, style = _result(outcome, report.findings)
        first = wide + 2 + 7 + 2
        words = _wrapped(outcome.reason if word in ("n/a", "unknown", "stopped") else "", width - first)
        words = words or _wrapped(outcome.promise.rstrip("."), width - first) or [""]
        yield StyledText(f"{outcome.name:{wide}}  "), StyledText(f"{word:7}  ", style), StyledText(words[0], "quiet")
        for more in words[1:]:
            yield (StyledText(" " * first + more, "quiet"),)


def _result(outcome: Outcome, findings: Sequence[Finding]) -> tuple[str, str]:
    if outcome.status == "failed":
        own = any(label(finding) == outcome.name and finding.severity == "error" for finding in findings)
        return ("BROKEN", "bad") if own else ("stopped", "bad")  # by what is told under another family
    if outcome.status == "n/a":
        return ("n/a", "n/a") if outcome.measured else ("unknown", "warning")
    warned = any(finding.check == outcome.name and finding.severity == "warning" for finding in findings)
    return ("warning", "warning") if warned else ("ok", "ok")


# One finding, as compilers write them


def _finding(finding: Finding, width: int) -> Iterator[Line]:
    severity = StyledText(f"{finding.severity}: ", finding.severity)
    yield from _filled(
        (severity, StyledText(f"{finding.message.rstrip('.')}.")), "", "  ", width, tail=f" [{label(finding)}]"
    )
    if finding.location is not None:
        number = str(finding.location.line)
        yield StyledText(f"  {' ' * len(number)}--> ", "quiet"), StyledText(place(finding.location), "path")
        if finding.location.code:
            yield StyledText(f"  {number} | ", "quiet"), StyledText(finding.location.code, "code")
    if finding.example:
        shown = " and ".join(str(list(document)) for document in finding.example)
        yield from _filled((StyledText(shown),), "  with  ", " " * 8, width)
    if finding.effect and finding.severity != "note":
        yield from _filled((StyledText(finding.effect),), "  why   ", " " * 8, width)
    for at, line in enumerate(fix_lines(finding.fix, width - 8)):
        yield from _filled((StyledText(line, "fix"),), " " * 8 if at else "  fix  ", " " * 8, width)


def fix_lines(fix: str, width: int) -> Iterator[str]:
    """The lines of a fix. A comment after code is moved above it if the line would be too long."""
    for line in fix.splitlines():
        code, mark, comment = line.partition("  # ")
        if mark and len(line) > width and is_code(line):
            yield f"# {comment}"
            yield code
        else:
            yield line


def is_code(line: str) -> bool:
    """Whether a line of a fix is code and not a sentence: an assignment, a call, a statement or a comment."""
    target = r"[\w.]+(\[[^\]]*\])?"
    return bool(
        re.match(rf"\s*({target}(, {target})* [-+*/@]?= |[\w.]+\(|(return|assert|raise|for|if|with|def|del) |#)", line)
    )


def _filled(pieces: Sequence[StyledText], first: str, rest: str, width: int, tail: str = "") -> Iterator[Line]:
    """Pieces of one paragraph broken into lines. `first` and `rest` are the prefixes of the lines; `tail` is quiet text
    at the end."""
    text = "".join(piece.text for piece in pieces) + tail
    for at, line in enumerate(_wrapped(text, width - len(rest if first.isspace() or not first else first)) or [""]):
        head = rest if at else first
        yield StyledText(head, "quiet"), *_styled(line, pieces, tail, is_first=at == 0)


def _styled(line: str, pieces: Sequence[StyledText], tail: str, *, is_first: bool) -> Iterator[StyledText]:
    if is_first and len(pieces) > 1 and line.startswith(pieces[0].text):
        yield pieces[0]
        line = line[len(pieces[0].text) :]
    if tail and line.endswith(tail.strip()):
        yield StyledText(line.removesuffix(tail.strip()), pieces[-1].style)
        yield StyledText(tail.strip(), "quiet")
    else:
        yield StyledText(line, pieces[-1].style)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
