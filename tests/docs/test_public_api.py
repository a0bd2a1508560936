"""The public names and their signatures change only with a line in the changelog."""

from __future__ import annotations

import difflib

import public_api
import pytest

pytest.importorskip("lightning", reason="the public names of training need the extra's packages")


def test_the_public_api_is_the_one_that_was_announced():
    before = public_api.SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(before, public_api.text().splitlines(), "announced", "now", lineterm="", n=0))
    if changes:
        pytest.fail(
            "The public API has changed. Announce the change under Unreleased in CHANGELOG.md, then run "
            "`python tests/docs/public_api.py`.\n" + "\n".join(changes),
            pytrace=False,
        )


class Thing:
    """A class of this test, which counts as one of Saccade's."""

    __module__ = "saccade.thing"

    def __init__(self, size: int, *, rate: float = 0.5) -> None: ...

    def run(self, text: str, /, *rest: str, last: bool = False) -> list[str]: ...

    @property
    def width(self) -> int | None: ...

    @classmethod
    def of(cls, path: str) -> Thing: ...

    def _own(self) -> None: ...


def test_what_the_text_shows_of_a_class():
    """A form that is left out could change unannounced."""
    assert public_api.described("saccade.Thing", Thing) == [
        "class saccade.Thing(size: int, *, rate: float = 0.5)",
        "classmethod saccade.Thing.of(cls, path: str) -> Thing",
        "def saccade.Thing.run(self, text: str, /, *rest: str, last: bool = False) -> list[str]",
        "property saccade.Thing.width -> int | None",
    ]


class Narrower(Thing):
    """Overrides one member without another way to call it, and one with."""

    __module__ = "saccade.thing"

    def run(self, text: bytes, /, *rest: bytes, last: bool = False) -> list[str]: ...

    @classmethod
    def of(cls, path: str, more: int = 1) -> Narrower: ...


def test_an_override_is_listed_where_it_is_called_in_another_way(monkeypatch):
    """Each promise stands once, but no change of one stays out of the text."""
    monkeypatch.setattr(public_api, "public_classes", lambda: frozenset({Thing, Narrower}))
    assert public_api.described("saccade.Narrower", Narrower) == [
        "class saccade.Narrower(size: int, *, rate: float = 0.5) extends Thing",
        "classmethod saccade.Narrower.of(cls, path: str, more: int = 1) -> Narrower",
    ]
