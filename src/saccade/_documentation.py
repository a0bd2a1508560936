"""The built pages of the documentation that belong to this version: where they are, and which answers some words.

A wheel has them in `saccade/_site` when they were built before it was. A source checkout builds them on request.
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ._extras import NotInstalled

PACKAGE = Path(__file__).parent
SITE = PACKAGE / "_site"
CHECKOUT = PACKAGE.parents[1]
_SHOWN = 5


class Found(NamedTuple):
    """A page or a section: its title, its page's title, and where it stands on the site (`look.html#roles`)."""

    title: str
    page: str
    place: str

    def __str__(self) -> str:
        return self.title if self.title == self.page else f"{self.page}: {self.title}"


def built_site(version: str, *, anew: bool = False, begin: Callable[[], object] = lambda: None) -> Path:
    """The folder of the built pages; a source checkout that has none of this version builds them.

    `begin` is called before a build.

    Raises:
        NotInstalled: they have to be built, and MkDocs is missing.
        FileNotFoundError: this is an installation without the pages.
        RuntimeError: the build fails.
    """
    checkout = (CHECKOUT / "mkdocs.yml").is_file()
    if _version(SITE) == version and not (anew and checkout):
        return SITE
    if not checkout:
        raise FileNotFoundError(
            "this installation of Saccade has no built pages; they come with it after these commands in the folder of "
            'Saccade: pip install -c constraints.txt ".[docs]" && .ci/site src/saccade/_site && pip install .'
        )
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise NotInstalled("saccade docs", module, "docs")
    begin()
    _build(SITE)
    return SITE


def search(site: Path, words: str) -> list[Found]:
    """The best pages and sections for some words, at most five: commands and public names of that name, then what has
    all the words, those in titles first."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    ranked = sorted(_ranked(index["docs"], words.split()), key=lambda pair: pair[0])
    return [found for _, found in ranked[:_SHOWN]]


def _ranked(sections: list[dict[str, str]], words: list[str]) -> Iterator[tuple[tuple[float, ...], Found]]:
    pages: dict[str, str] = {}
    asked, folded = " ".join(words), [word.casefold() for word in words]
    for order, section in enumerate(sections):
        place, title = section["location"], _plain(section["title"])
        page = pages.setdefault(place.partition("#")[0], title)
        points = _points(folded, title.casefold(), page.casefold(), _plain(section["text"]).casefold())
        if title == f"saccade {asked}" or _names(place, asked):
            yield (0, place.count("."), order), Found(title, page, place)
        elif points:
            yield (1, -points, "#" in place, len(title), order), Found(title, page, place)


def _names(place: str, asked: str) -> bool:
    """Whether a section is about the public name that is asked for, with its package or without."""
    page, _, anchor = place.partition("#")
    package, _, name = anchor.rpartition(".")
    return asked == anchor != "" or (asked == name and page == f"reference/{package}.html")


def _points(words: list[str], title: str, page: str, text: str) -> float:
    """How well a section answers; 0 where a word is nowhere in it."""
    points = [_points_of_word(word, title, page, text) for word in words]
    return sum(points) if all(points) else 0.0


def _points_of_word(word: str, title: str, page: str, text: str) -> float:
    if word in title:
        return 4.0 if re.search(rf"\b{re.escape(word)}\b", title) else 3.0
    return 2.0 if word in page else min(text.count(word), 10) / 10


def _plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())


def _version(site: Path) -> str | None:
    file = site / "version.txt"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _build(site: Path) -> None:
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the pages cannot be built:\n{done.stderr or done.stdout}")
