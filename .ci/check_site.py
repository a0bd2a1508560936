"""Check a built site: its pages load nothing from the network, and every link within it leads to a page and an anchor.

MkDocs checks links between Markdown pages. This reads the HTML: links of templates, docstrings and raw HTML, too.
Where playwright finds a Chromium, some pages are also opened from their files, and a request to any host is an error.
"""

from __future__ import annotations

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGEST = 32 * 2**20
LOADS = {"src", "srcset", "poster", "data"}
OPENED = ("index.html", "reference/saccade.html", "reference/masks.html", "self-attention-in-an-hour.html")
_CSS = re.compile(r"""@import\s+["']?([^"';\s]+)|url\(\s*["']?([^"')]+)""")


class Page(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, text: str):
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.anchors: set[str] = set()
        self.problems: list[str] = []
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self._style = tag == "style"
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loaded += [value for name, value in given.items() if name in LOADS and tag != "param"]
        self.loaded += _in_css(given.get("style", ""))
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(given.get("href", ""))
        elif tag in ("use", "image"):
            self.loaded += [given[name] for name in ("href", "xlink:href") if name in given]
        elif "href" in given:
            self.linked.append(given["href"])
        if "mermaid" in given.get("class", "").split():
            self.problems.append("a mermaid diagram, which loads a script from the network")

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loaded += _in_css(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False


def check(site: Path) -> list[str]:
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    problems = [f"{file.relative_to(site)}: {one}" for file, page in pages.items() for one in page.problems]
    for file, page in pages.items():
        name = file.relative_to(site)
        problems += [f"{name}: loads {one}" for one in page.loaded if not _local(one)]
        if name.name != "404.html":  # its links begin at the root of a server
            wanted = [one for one in [*page.loaded, *page.linked] if _local(one) and not one.startswith("data:")]
            problems += [f"{name}: no {one}" for one in sorted(set(wanted)) if not _there(one, file, pages)]
    for file in site.rglob("*.css"):
        loaded = _in_css(file.read_text(encoding="utf-8"))
        problems += [f"{file.relative_to(site)}: loads {one}" for one in loaded if not _local(one)]
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
    if size > LARGEST:
        problems.append(f"{size / 2**20:.1f} MiB, at most {LARGEST / 2**20:.0f}")
    print(f"{site}: {len(pages)} pages, {size / 2**20:.1f} MiB")
    return problems


def requests(site: Path) -> list[str]:
    """What pages ask of the network when a browser opens them from their files, and what their scripts report."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        print("skipped: pages in a browser (playwright is missing)")
        return []
    problems: list[str] = []
    system = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox"])
        except Error:
            print("skipped: pages in a browser (there is no Chromium)")
            return []
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("request", lambda one: None if _local(one.url) else problems.append(f"{page.url}: asks for {one.url}"))
        page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
        for name in OPENED:
            page.goto((site / name).absolute().as_uri())
            page.wait_for_load_state("networkidle")
            if page.evaluate("document.documentElement.scrollWidth") > 390:
                problems.append(f"{name}: wider than a phone")
        page.set_viewport_size({"width": 1280, "height": 900})
        page.fill("input.md-search__input", "window mask")
        page.wait_for_selector(".md-search-result__item a", timeout=30_000)
        browser.close()
    return problems


def _local(address: str) -> bool:
    return urlsplit(address).scheme in ("", "file", "data", "blob") and not address.startswith("//")


def _there(link: str, file: Path, pages: dict[Path, Page]) -> bool:
    parts = urlsplit(link)
    target = Path(file.parent, unquote(parts.path)).resolve() if parts.path else file.resolve()
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return False
    page = pages.get(target) if parts.fragment else None
    return page is None or unquote(parts.fragment) in page.anchors or parts.fragment.startswith("__")


def _in_css(text: str) -> list[str]:
    return [first or second for first, second in _CSS.findall(text)]


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    found = check(folder) + requests(folder)
    if found:
        sys.exit("\n".join(found))
