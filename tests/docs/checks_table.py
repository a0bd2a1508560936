"""The table of checks of docs/verifying.md, as the checks themselves tell it."""

from __future__ import annotations

import re

from pages import ROOT

from saccade.verification.checks import CHECKS

PAGE = ROOT / "docs" / "verifying.md"
HEAD = "| check | it promises | it is tested so | why |\n|---|---|---|---|\n"


def rows() -> list[str]:
    return [f"| {_name(one)} | {_cell(one.promise)} | {_cell(one.how)} | {_cell(one.why)} |" for one in CHECKS]


def with_table(text: str) -> str:
    """The page's text with the table as it is now."""
    before, head, after = text.partition(HEAD)
    assert head, f"{PAGE} has no table of checks"
    return before + head + "\n".join(rows()) + "\n" + re.sub(r"\A(\|.*\n)*", "", after)


def _name(check) -> str:
    return f"[{check.name}](pitfalls/{check.family}.md)"


def _cell(sentence: str) -> str:
    return sentence.rstrip(".").replace("|", "\\|")
