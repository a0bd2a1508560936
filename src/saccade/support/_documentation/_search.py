"""Which page answers some words: stems and synonyms, guides before the reference, that before results and decisions.

    points = kind * covered^2 * sum of rarity * (4 in the title, 2 in that of the page, up to 1 in the text)

over the concepts of a question: its words, or several with one meaning, with what our pages call it.
"""

from __future__ import annotations

import functools
import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from ._synonyms import SYNONYMS

_SHOWN = 5
_LISTS = ("contract.html", "corrections.html", "variants-table.html", "verify-faults.html", "statistics.html")
KINDS = {"reference": 0.6, "benchmarks": 0.4, **dict.fromkeys(_LISTS, 0.8)}  # guides have 1
FOR_CONTRIBUTORS = 0.3  # those of _INSIDE
_INSIDE = {"decisions", "native", "client", "src", "tests", "architecture.html", "extending.html"}
_INSIDE |= {"CONTRIBUTING.html", "CHANGELOG.html", "SECURITY.html"}
IN_TITLE, IN_PAGE_TITLE, PHRASE = 4.0, 2.0, 1.5
_WORDS = re.compile(r"[^\W_]+")
_ENDINGS = (
    *("izations", "ization", "isation", "ications", "ication", "ations", "ation", "ating", "ances", "ance", "ences"),
    *("ence", "izing", "ising", "ized", "ised", "izes", "ise", "ize", "iers", "ier", "ies", "ated", "ates", "ate"),
    *("ants", "ant", "ents", "ent", "ities", "ity", "ings", "ing", "ions", "ion", "ally", "ed", "es", "al", "ly", "s"),
    *("y", "e"),
)
_SHORTEST = 3  # letters of a stem


class Found(NamedTuple):
    """A page or a section: its title, its page's title, its address on the site (`look.html#roles`), and whether it
    answers all words of the question."""

    title: str
    page: str
    place: str
    whole: bool = True

    def __str__(self) -> str:
        return self.title if self.title == self.page else f"{self.page}: {self.title}"


class _Section(NamedTuple):
    """A section in stems."""

    title: str
    page: str
    place: str
    in_title: tuple[str, ...]
    before_colon: tuple[str, ...]
    in_page: tuple[str, ...]
    text: tuple[str, ...]
    counts: Counter[str]


class _Concept(NamedTuple):
    """A word of the question, or several with one meaning: ways to say it, each as stems, and how rare it is."""

    ways: tuple[tuple[str, ...], ...]
    rarity: float


def search(site: Path, words: str) -> list[Found]:
    """The best pages and sections for some words, at most five: commands and public names of that name, then by points.

    A word that no page has counts as the nearest existing word. [] if nothing is near.
    """
    sections = _sections(site / "search" / "search_index.json")
    there = Counter(stem for section in sections for stem in {*section.in_title, *section.counts})
    concepts = list(_concepts(words, there, len(sections)))
    points = [_points(section, concepts) for section in sections]
    ranked = sorted(range(len(sections)), key=lambda i: (-points[i][0], len(sections[i].place)))
    named = [i for i, section in enumerate(sections) if _is_of(words, section)]
    best = [*sorted(named, key=lambda i: sections[i].place.count(".")), *(i for i in ranked if points[i][0])]
    return [points[i][1] for i in dict.fromkeys(best)][:_SHOWN]


@functools.lru_cache(1)
def _sections(index: Path) -> list[_Section]:
    pages: dict[str, str] = {}
    found = []
    for section in json.loads(index.read_text(encoding="utf-8"))["docs"]:
        place, title = section["location"], re.sub(r"^\d+\. ", "", _plain(section["title"]))
        page = pages.setdefault(place.partition("#")[0], title)
        text = _stems(_plain(section["text"]))
        found.append(
            _Section(
                title, page, place, _stems(title), _stems(title.partition(":")[0]), _stems(page), text, Counter(text)
            )
        )
    return found


def _is_of(words: str, section: _Section) -> bool:
    """Whether a section is about the command or the public name that is asked for, with its package or without.

    A plain word, such as streaming, is a name only where `saccade` itself has it.
    """
    page, _, anchor = section.place.partition("#")
    package, _, name = anchor.rpartition(".")
    asked = " ".join(words.split())
    if section.title == f"saccade {asked}" or (page.startswith("reference/saccade") and asked == anchor):
        return True
    plain = asked.isalpha() and asked.islower() and package != "saccade"
    return asked == name and page == f"reference/{package}.html" and not plain


def _concepts(words: str, there: Counter[str], sections: int) -> Iterator[_Concept]:
    """The words of a question, synonyms grouped. A word that no page has is replaced by the nearest word of a page."""
    stems = list(_stems(words))
    while stems:
        size = next(n for n in range(len(stems), 0, -1) if n == 1 or tuple(stems[:n]) in _ways())
        asked, stems = tuple(stems[:size]), stems[size:]
        if size == 1 and asked[0] not in there and asked not in _ways():
            asked = (*get_close_matches(asked[0], list(there), 1, 0.75), asked[0])[:1]
        ways = (asked, *_ways().get(asked, ()))
        rarity = max(math.log(1 + sections / (1 + min(there[stem] for stem in way))) for way in ways)
        yield _Concept(ways, rarity)


def _points(section: _Section, concepts: Sequence[_Concept]) -> tuple[float, Found]:
    points = [max(_points_of_way(section, way) for way in concept.ways) for concept in concepts]
    total = sum(concept.rarity for concept in concepts)
    covered = sum(concept.rarity for concept, value in zip(concepts, points, strict=True) if value) / (total or 1.0)
    whole = sum(concept.rarity * value for concept, value in zip(concepts, points, strict=True))
    return _kind(section.place) * covered**2 * whole, Found(section.title, section.page, section.place, covered > 0.999)


def _points_of_way(section: _Section, way: Sequence[str]) -> float:
    """Points of a section for one way to say a concept; 0 if the section lacks a word of it."""
    found = [_points_of_stem(section, stem) for stem in way]
    if not all(found):
        return 0.0
    if tuple(way) in (section.in_title, section.before_colon):
        return IN_TITLE * PHRASE + 1.0
    together = len(way) > 1 and any(_has_phrase(field, way) for field in (section.in_title, section.text))
    return sum(found) / len(found) * (PHRASE if together else 1.0)


def _points_of_stem(section: _Section, stem: str) -> float:
    if stem in section.in_title:
        return IN_TITLE + 1 / len(section.in_title)
    times = section.counts[stem]
    return (IN_PAGE_TITLE if stem in section.in_page else 0.0) + times / (times + 1 + len(section.text) / 200)


def _has_phrase(field: Sequence[str], way: Sequence[str]) -> bool:
    return any(tuple(field[i : i + len(way)]) == tuple(way) for i, stem in enumerate(field) if stem == way[0])


def _kind(place: str) -> float:
    top = re.split(r"[/#]", place)[0]
    return FOR_CONTRIBUTORS if top in _INSIDE else KINDS.get(top, 1.0)


@functools.cache
def _ways() -> dict[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """The terms of our pages for each entry of `SYNONYMS`, in stems."""
    found: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}
    for ours, terms in SYNONYMS.items():
        for theirs in terms.split(", "):
            found[_stems(theirs)] = (*found.get(_stems(theirs), ()), _stems(ours))
    return found


def _stems(text: str) -> tuple[str, ...]:
    return tuple(_stem(word) for word in _WORDS.findall(text.casefold()))


@functools.lru_cache(2**16)
def _stem(word: str) -> str:
    """The word without endings, three at most, so that "equivariance" finds "equivariant"; three letters stay."""
    for _ in range(3):
        ending = next((end for end in _ENDINGS if word.endswith(end) and len(word) - len(end) >= _SHORTEST), "")
        if not ending or word.endswith("ss"):
            break
        word = word[: -len(ending)]
    return word[:-1] if len(word) > _SHORTEST and word[-1] == word[-2] else word


def _plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())
