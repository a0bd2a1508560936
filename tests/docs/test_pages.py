"""Every block of the README and of docs/ runs, and prints what the page says it prints."""

from __future__ import annotations

import ast
import re

import pytest
from pages import PAGES, ROOT, blocks, console, needed, run_python, run_shell, same_output, save_python

from saccade.inspection import open_model
from saccade.viewer.server._steps import MOST_STEPS

README = ROOT / "README.md"
SET_UP = [
    r'pip install -c constraints\.txt \. && saccade look "[^"]+"',
    r'pip install -c constraints\.txt -e "\.\[test\]" && pytest',
]


def pages_with(language: str):
    return [pytest.param(page, id=page.stem, marks=marks(page, language)) for page in PAGES if blocks(page, language)]


def marks(page, language: str):
    """Commands take seconds, some pages train, verify, draw, compile or load models, and of others half is enough."""
    slow = (
        *("answer", "before-you-train", "building", "classify", "forecast", "graph", "image", "mlm", "search"),
        *("self-attention-in-an-hour", "several-labels", "speech", "tag", "tasks", "translate", "verifying"),
        "write-your-own-attention",
        *(
            "accelerating",
            "caches",
            "checkpoints",
            "corrections",
            "drawing",
            "extending",
            "int8",
            "marian",
            "monitoring",
        ),
        *("variants", "viewing", "watching"),
    )
    is_slow = language in ("sh", "console") or page.stem in slow or PAGES.index(page) % 2
    return [pytest.mark.slow] if is_slow else []


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # Lightning's own
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_python(page) > 0


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.stem != "self-attention-in-an-hour"],
    ids=lambda page: page.stem,
)
def test_a_block_that_needs_nothing_but_imports_has_them(page):
    """It is copied alone, then. Blocks that go on with what others made may lean on their imports, too.

    The page that is a notebook is run as one.
    """
    imported = set()
    for block in blocks(page, "python"):
        missing = needed(block.text)
        assert not missing or not missing <= imported, f"{page.name}:{block.line} does not import {missing}"
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}


@pytest.mark.parametrize("page", pages_with("sh"))
def test_shell_blocks_run(page, tmp_path):
    commands = [block.text for block in blocks(page, "sh") if "pip install" not in block.text]
    for command in commands:
        run_shell(command, tmp_path)
    assert commands or page == README


@pytest.mark.parametrize("page", pages_with("console"))
def test_console_blocks_show_what_is_printed(page, tmp_path):
    save_python(page, tmp_path)
    for block in blocks(page, "console"):
        command, shown = console(block)
        came = run_shell(command, tmp_path)
        assert same_output(shown, came), f"{page.name}:{block.line} shows other output than this:\n{came}"


def test_the_readme_has_exactly_the_two_set_up_commands():
    found = re.findall(r"^pip install .* && .*$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 2
    assert all(re.fullmatch(expected, command) for expected, command in zip(SET_UP, found, strict=True)), found


def test_the_texts_that_the_viewing_page_compares_have_equally_many_tokens():
    page = (ROOT / "docs" / "viewing.md").read_text(encoding="utf-8")
    [texts] = re.findall(r'^saccade view "(.*)" --against "(.*)"$', page, re.MULTILINE)
    ours, theirs = (open_model(None).encode(text).ids for text in texts)
    assert ours != theirs and len(ours) == len(theirs)


@pytest.mark.parametrize("name", ["viewing", "step-by-step"])
def test_the_pages_name_the_longest_text_with_steps(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert "*Step* shows" in text and f"for texts of up to {MOST_STEPS:,} tokens" in text


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_same_output_tells_words_and_numbers_apart():
    assert same_output("head 2.5 at .50\n", "head 2.5  at .51")
    assert not same_output("head 2.5 at .50", "head 2.5 at .60")
    assert not same_output("head 2.5 at .50", "layer 2.5 at .50")
    assert same_output("17 checks in 3.4 s", "17 checks in 7 s")
    assert same_output("#7e5109", "#7e5109") and not same_output("#7e5109", "#7e5309")
    assert not same_output("17 checks in 3.4 s", "18 checks in 7 s")


def test_the_readmes_broken_module_differs_from_the_textbooks_by_its_diff():
    right, broken = (
        (ROOT / "docs" / "examples" / f"{name}_attention.py").read_text(encoding="utf-8")
        for name in ("textbook", "broken")
    )
    (diff,) = blocks(README, "diff")
    old, new = (line[1:] for line in diff.text.splitlines())
    assert right.count(old) == 1 and right.partition("\n")[2].replace(old, new) == broken.partition("\n")[2]
