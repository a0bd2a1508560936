"""The version stands in `saccade/__init__.py`; the files that repeat it for readers have the same one."""

from __future__ import annotations

import re
from pathlib import Path

import saccade

ROOT = Path(__file__).parents[2]


def test_the_changelog_and_the_citation_have_the_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    for latest in headings[1:2]:  # none before the first release
        assert re.fullmatch(rf"{re.escape(saccade.__version__)} - \d{{4}}-\d\d-\d\d", latest)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [saccade.__version__]
