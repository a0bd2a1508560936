"""Every page is in the site's navigation once, and the check of a built site finds what it is for."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from pages import ROOT

spec = importlib.util.spec_from_file_location("check_site", ROOT / ".ci" / "check_site.py")
check_site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_site)


def places(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from places(below)


def test_every_page_of_docs_is_in_the_navigation_once():
    docs = ROOT / "docs"
    pages = [file.relative_to(docs).as_posix() for file in docs.rglob("*.md")]
    listed: Counter[str] = Counter()
    for place in places(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]):
        if place.endswith("*"):
            listed.update(page for page in pages if page.startswith(place[:-1]) and not page.endswith("README.md"))
        else:
            listed[place] += 1
    assert not set(pages) - set(listed)
    assert [place for place, count in listed.items() if count > 1] == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="https://example.org/">elsewhere</a> <a href="b.html#there">b</a> <img src="data:,">', None),
        ('<script src="https://example.org/a.js"></script>', "index.html: loads https://example.org/a.js"),
        ('<img src="//example.org/a.png">', "index.html: loads //example.org/a.png"),
        ('<link rel="preconnect" href="https://example.org">', "index.html: loads https://example.org"),
        ("<style>@import 'https://example.org/a.css';</style>", "index.html: loads https://example.org/a.css"),
        ('<p style="background: url(http://example.org/a.png)">', "index.html: loads http://example.org/a.png"),
        ('<a href="c.html">c</a>', "index.html: no c.html"),
        ('<a href="b.html#gone">b</a>', "index.html: no b.html#gone"),
        ('<a href="#gone">here</a>', "index.html: no #gone"),
        ('<pre class="mermaid"></pre>', "index.html: a mermaid diagram, which loads a script from the network"),
    ],
)
def test_a_page_that_loads_from_a_network_or_leads_nowhere_is_found(body, problem, tmp_path):
    (tmp_path / "index.html").write_text(body, encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="there">b</h2>', encoding="utf-8")
    assert check_site.check(tmp_path) == ([problem] if problem else [])


def test_a_style_sheet_that_loads_from_a_network_is_found(tmp_path):
    (tmp_path / "a.css").write_text("@font-face { src: url('https://example.org/a.woff2') }", encoding="utf-8")
    assert check_site.check(tmp_path) == ["a.css: loads https://example.org/a.woff2"]
