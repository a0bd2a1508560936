"""Pages from outside docs/ that its pages link to: results of benchmarks, CONTRIBUTING.md, tests with planted faults.

On the site docs/ is the top folder, and what lies beside docs/ stands below it under its own path. Links between the
two are rewritten as the pages are read, so that the files in the repository keep links that work there.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path, PurePosixPath

import notebooks
from repository import DOCS, ROOT

_FENCED = re.compile(r"(^ *```.*?^ *```[ \t]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_SINGLE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "native/README.md",
    "client/README.md",
    "tests/mutations/README.md",
)


@functools.cache
def pages() -> dict[str, str]:
    """Markdown by its place on the site."""
    files = [*sorted((ROOT / "benchmarks" / "results").glob("*.md")), *(ROOT / name for name in _SINGLE)]
    files.append(ROOT / "src" / "saccade" / "make" / "models" / "embedded" / "README.md")
    return {_place(file): file.read_text(encoding="utf-8") for file in files}


@functools.cache
def sources() -> dict[str, str]:
    """A page for each file of code that a page links to."""
    linked: dict[str, str] = {}
    texts = {file: file.read_text(encoding="utf-8") for file in DOCS.rglob("*.md")}
    texts |= {_file(place): text for place, text in pages().items()}
    for file, text in texts.items():
        for path, _ in _LINK.findall(_FENCED.sub("", text)):
            code = _resolved(file, path)
            if code.suffix == ".py" and code.is_file() and code.is_relative_to(ROOT):
                name = code.relative_to(ROOT)
                shown = f"```python\n{code.read_text(encoding='utf-8').rstrip()}\n```\n"
                linked[_place(code)] = f"---\nsearch:\n  exclude: true\n---\n\n# `{name}`\n\n{shown}"
    return linked


def with_links_of_the_site(markdown: str, place: str) -> str:
    """The text of a page with links to where other pages stand on the site."""
    if place.startswith("reference/"):
        return markdown
    file = _file(place)

    def on_site(link: re.Match[str]) -> str:
        target = _resolved(file, link[1])
        page = _place(target.with_suffix(".md"))
        if target.suffix == ".ipynb" and page in notebooks.pages() and page != place:
            target = target.with_suffix(".md")
        elif not target.exists() or (target.is_relative_to(DOCS) and file.is_relative_to(DOCS)):
            return link[0]
        to = os.path.relpath(_place(target), PurePosixPath(place).parent)
        return f"]({to}{link[2] or ''})"

    parts = _FENCED.split(markdown)
    return "".join(part if n % 2 else _LINK.sub(on_site, part) for n, part in enumerate(parts))


def _resolved(file: Path, link: str) -> Path:
    return Path(os.path.normpath(file.parent / link))


def _place(file: Path) -> str:
    """Where a file of the repository stands on the site."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(ROOT).as_posix()
    return f"{name}.md" if name.endswith(".py") else name


def _file(place: str) -> Path:
    """Which file of the repository stands at a place on the site."""
    outside = ROOT / place.removesuffix(".md") if place.endswith(".py.md") else ROOT / place
    return outside if outside.is_file() and place != "README.md" else DOCS / place
