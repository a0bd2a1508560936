"""Each page on a pitfall: its code has just that pitfall, and its diff fixes it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from pages import ROOT, blocks, console, save_python

from saccade.cli import main
from saccade.verification.checks import CHECKS
from saccade.verification.findings._finding import FAMILIES

PITFALLS = sorted(path for path in (ROOT / "docs" / "pitfalls").glob("*.md") if path.stem != "README")


def verified(page: Path, capsys) -> list[dict]:
    """The findings of the page's command."""
    command, _ = console(blocks(page, "console")[0])
    words = shlex.split(command)[1:]
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)["findings"]


def fixed(text: str, diff: str) -> str:
    """The text with the diff's lines put in place of those that it takes away."""
    old = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    new = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(old) == 1 and text.count(old[0] + "\n") == 1, old
    return text.replace(old[0], "\n".join(new))


def test_every_family_has_its_page():
    assert {page.stem for page in PITFALLS} == set(FAMILIES)


@pytest.mark.parametrize("page", PITFALLS, ids=lambda page: page.stem)
def test_the_page_shows_one_error_of_its_family(page):
    """That the command prints what is shown is asked in `test_pages`."""
    _, shown = console(blocks(page, "console")[0])
    (named,) = re.findall(r"^error: .*?\[([\w -]+)\]$", shown, re.MULTILINE | re.DOTALL)
    assert [check.family for check in CHECKS if check.name == named] == [page.stem]
    assert shown.count("\nerror: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", PITFALLS, ids=lambda page: page.stem)
def test_the_mend_mends_it(page, tmp_path, monkeypatch, capsys):
    import torch._dynamo  # noqa: F401  # once here, and not in the child of every page

    monkeypatch.chdir(tmp_path)
    save_python(page, tmp_path)
    (file,) = tmp_path.glob("*.py")
    (diff,) = blocks(page, "diff")
    file.write_text(fixed(file.read_text(encoding="utf-8"), diff.text), encoding="utf-8")
    left = [one for one in verified(page, capsys) if one["severity"] == "error"]
    assert left == []
