"""The report as a web page: one file, offline, of light and dark. And as the part of a page that a notebook shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..findings._finding import Finding
from ..findings._results import Results
from ..findings._words import plain
from ._text import is_code, label, place, verdict

_WORDS = {"error": "Error", "warning": "Warning", "note": "Note", "n/a": "Not applicable"}


def as_page(report: Results, generator: str = "Saccade") -> str:
    """A report as a whole HTML page without scripts. Everything from the target is escaped.

    Args:
        generator: the program that made the page, with its version.

    Example:
        >>> import torch, saccade
        >>> report = saccade.verify(torch.nn.functional.scaled_dot_product_attention, checks=["scale"], isolated=False)
        >>> page = saccade.verification.as_page(report)
        >>> page[:15], "<script" in page
        ('<!doctype html>', False)
    """
    return _rendered("page.html.j2", report, generator)


def as_fragment(report: Results) -> str:
    """The report for a notebook, with its own background: its colours follow the system, not the notebook's theme."""
    style = "padding:1rem 1.25rem;color-scheme:light dark;background:light-dark(#fdfdfc,#111216)"
    return f'<div style="{style}">{_rendered("report.html.j2", report, "Saccade")}</div>'


def _rendered(template: str, report: Results, generator: str) -> str:
    import jinja2

    from ..checks import CHECKS

    folder = Path(__file__).parent / "templates"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template(template).render(
        report=report,
        verdict=verdict(report),
        generator=generator,
        css=(folder / "report.css").read_text(encoding="utf-8"),
        findings=[_finding(finding) for finding in report.findings],
        checks={check.name: check for check in CHECKS},
        counts=_counts(report),
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs, which no file can hold


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity,
        "word": _WORDS[finding.severity],
        "family": label(finding),
        "message": finding.message.rstrip(".") + ".",
        "effect": finding.effect,
        "fix": [(is_code(line), line) for line in finding.fix.splitlines()],
        "place": place(finding.location) if finding.location else "",
        "line": finding.location.line if finding.location else 0,
        "code": finding.location.code if finding.location else "",
        "evidence": json.dumps(plain(finding.evidence), ensure_ascii=False) if finding.evidence else "",
    }


def _counts(report: Results) -> dict[str, int]:
    statuses = [outcome.status for outcome in report.outcomes]
    return {"passed": statuses.count("passed"), "failed": statuses.count("failed"), "skipped": statuses.count("n/a")}
