"""`saccade docs`: the pages of this version, and which page some words open."""

from __future__ import annotations

import json
import webbrowser

import pytest

from saccade import __version__, cli
from saccade.support._documentation import _site

SECTIONS = {
    "look.html": ("What <code>saccade look</code> shows", "sentences, a map, a window"),
    "look.html#scores": ("Scores", "a mask of scores"),
    "masks.html": ("Masks", "each mask drawn"),
    "masks.html#window": ("Window", "a band of keys; a mask"),
    "reference/commands/look.html": ("saccade look", "options"),
    "reference/saccade.html#saccade.Window": ("Window", "sliding window &amp; mask"),
    "reference/saccade.nn.html#saccade.nn.Block.Window": ("Window", "a method"),
    "reference/saccade.inspection.html#saccade.inspection.look": ("look", "read a text"),
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    (tmp_path / "search").mkdir()
    docs = [{"location": place, "title": title, "text": text} for place, (title, text) in SECTIONS.items()]
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"docs": docs}), encoding="utf-8")
    (tmp_path / "version.txt").write_text(__version__, encoding="utf-8")
    monkeypatch.setattr(_site, "SITE", tmp_path)
    return tmp_path


@pytest.fixture
def opened(monkeypatch):
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: addresses.append(address) is None)
    return addresses


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ([], "index.html"),
        (["Window"], "reference/saccade.html#saccade.Window"),  # a name, before a heading and a method of that name
        (["saccade.Window"], "reference/saccade.html#saccade.Window"),
        (["saccade.nn.Block.Window"], "reference/saccade.nn.html#saccade.nn.Block.Window"),
        (["look"], "reference/commands/look.html"),  # a command, before a function
        (["window", "mask"], "masks.html#window"),  # in two titles, before a title and a text
        (["WINDOW", "masks"], "masks.html#window"),
        (["sliding", "&"], "reference/saccade.html#saccade.Window"),
    ],
)
def test_words_open_the_page_that_answers_them(words, place, site, opened, capsys):
    assert cli.main(["docs", *words]) == 0
    assert opened == [f"{site.as_uri()}/{place}"]
    assert capsys.readouterr().out.splitlines()[-1] == opened[0]


def test_a_path_is_printed_and_nothing_opened(site, opened, capsys):
    assert cli.main(["docs", "saccade.Window", "--path"]) == 0
    assert capsys.readouterr().out == f"{site / 'reference/saccade.html'}\n"
    assert not opened


def test_without_a_browser_the_address_is_told(site, monkeypatch, capsys):
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert cli.main(["docs"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{site.as_uri()}/index.html\n"
    assert "No browser" in err


def test_words_of_which_some_are_nowhere_open_the_nearest_page(site, opened, capsys):
    assert cli.main(["docs", "window", "zebra"]) == 0
    assert opened == [f"{site.as_uri()}/masks.html#window"]
    assert "No page has all of 'window zebra'; this is the nearest." in capsys.readouterr().out
    assert cli.main(["docs", "sentenses"]) == 0  # a word as it is spelled somewhere
    assert opened[-1] == f"{site.as_uri()}/look.html"


def test_words_that_no_page_has_are_an_error(site, opened, capsys):
    assert cli.main(["docs", "zebra"]) == 2
    assert (
        capsys.readouterr().err
        == "saccade: error: zebra: no page has these words or similar ones; saccade docs alone opens the start page\n"
    )
    assert not opened


def test_pages_of_another_version_are_not_opened(site, tmp_path, monkeypatch, opened, capsys):
    (site / "version.txt").write_text("0.0.1", encoding="utf-8")
    monkeypatch.setattr(_site, "CHECKOUT", tmp_path)  # of no sources
    assert cli.main(["docs"]) == 2
    assert ".ci/site src/saccade/_site && pip install ." in capsys.readouterr().err
    assert not opened


def test_a_checkout_without_mkdocs_names_the_command_that_adds_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "mkdocs.yml").touch()
    monkeypatch.setattr(_site, "CHECKOUT", tmp_path)
    monkeypatch.setattr(_site, "SITE", tmp_path / "none")
    monkeypatch.setattr(_site.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["docs"]) == 2
    assert 'pip install "mkdocs-material>=9.6"' in capsys.readouterr().err


def test_what_stops_a_build_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "mkdocs.yml").write_text("nothing: here", encoding="utf-8")
    monkeypatch.setattr(_site, "CHECKOUT", tmp_path)
    monkeypatch.setattr(_site, "SITE", tmp_path / "none")
    assert cli.main(["docs"]) == 2
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "saccade: building the pages, which takes half a minute"
    assert "the pages cannot be built" in second
