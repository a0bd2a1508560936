"""The report as text."""

from __future__ import annotations

from ._finding import Report


def as_text(report: Report) -> str:
    """The table of checks and findings, without colours."""
    lines = [f"{report.target}: {report.called}"]
    lines += [f"{one.status:7}{one.family}  {one.reason}" for one in report.outcomes]
    lines += [f"{one.severity} {one.family}: {one.message}" for one in report.findings]
    return "\n".join(lines)
