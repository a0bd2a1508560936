from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from looks import LONG, SHORT, make

from saccade.inspection import hundredths
from saccade.viewer import _report, render_report

VOID = {"meta", "link", "br"}
NASTY = "</script><script>alert(1)</script> <b>&amp; \"quoted\" 'single' {{ 7*7 }} <!-- \u2028 -->"


class Page(HTMLParser):
    """Elements in order, their attributes and texts; closing tags must match."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open, self.texts = [], [], {}
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag):
        assert self.elements[self.open[-1]][0] == tag
        self.open.pop()

    def handle_data(self, data):
        for i in self.open:
            self.texts[i] = self.texts.get(i, "") + data

    def of_class(self, name):
        return [(i, a) for i, (_, a) in enumerate(self.elements) if name in (a.get("class") or "").split()]

    def text_of_id(self, wanted):
        return next(self.texts.get(i, "") for i, (_, a) in enumerate(self.elements) if a.get("id") == wanted)


def data_of(page):
    return json.loads(page.text_of_id("data"))


def weights_of(data):
    size = len(data["words"])
    rows = np.frombuffer(base64.b64decode(data["weights"]), np.uint8).reshape(len(data["heads"]), -1)
    out = np.zeros((len(data["heads"]), size, size), int)
    q, k = np.tril_indices(size)
    out[:, q, k] = rows
    return out


@pytest.mark.parametrize("text", [SHORT, LONG, "Nobody", NASTY, "one\n\ntwo lines\nthree"])
@pytest.mark.parametrize("roles", [True, False])
def test_structure_and_nothing_from_elsewhere(text, roles):
    look = make(text, roles=roles)
    html = render_report(look, "1.2.3")
    page = Page(html)
    assert html.startswith("<!doctype html>")
    names = {a.get("name"): a.get("content") for tag, a in page.elements if tag == "meta"}
    assert names["generator"] == "Saccade 1.2.3" and "width=device-width" in names["viewport"]
    assert not re.search(r"(https?:)?//[a-z]", html.replace("<!doctype", ""), re.IGNORECASE)
    for _, attributes in page.elements:
        for name in ("src", "href"):
            assert re.match(r"#\d|data:,$", attributes.get(name) or "#0")
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert len(page.of_class("w")) == len(look.seen.words) == len(data_of(page)["words"])
    assert len(page.of_class("tile")) == 10
    assert all(a["aria-label"].startswith("Layer ") for _, a in page.of_class("tile"))


def test_the_text_stays_text():
    look = make(NASTY)
    html = render_report(look, "1")
    page = Page(html)
    assert "<script>alert" not in html and "49" not in page.text_of_id("passage")
    assert page.text_of_id("passage").replace("\n  ", "").startswith("<s>" + NASTY[:60])
    assert data_of(page)["words"] == [w.label for w in look.seen.words]


@pytest.mark.parametrize(
    "text", [SHORT, "one\n\ntwo lines, \nthree \u732b  four", "e\u0301tude \u05e9\u05dc\u05d5\u05dd"]
)
def test_the_passage_is_the_text(text):
    page = Page(render_report(make(text), "1"))
    whole = page.text_of_id("passage").strip()
    for word in text.split():
        assert word in whole
    flat = [page.texts.get(i, "") for i, _ in page.of_class("w")]
    assert flat == ["<s>", *(w.label if "\n" in w.text else w.text for w in make(text).seen.words[1:])]


def test_weights_are_the_maps_in_hundredths():
    look = make()
    data = data_of(Page(render_report(look, "1")))
    expected = np.vectorize(hundredths)(look.seen.weights.reshape(10, 16, 16))
    assert (weights_of(data) == np.clip(expected, 0, 100)).all()


def test_sentences_link_to_their_head_and_word():
    look = make()
    page = Page(render_report(look, "1"))
    data = data_of(page)
    links = [(a["href"], page.texts[i]) for i, (tag, a) in enumerate(page.elements) if tag == "a"]
    told = [f for f in look.findings if f.layer is not None]
    assert [text for _, text in links] == [f.sentence for f in told]
    for (href, _), finding in zip(links, told, strict=True):
        layer, head, *word = map(int, href[1:].split("."))
        assert (layer, head) == finding.place
        if finding.query is not None:
            assert data["words"][word[0]] == look.seen.words[finding.query].label
            stored = weights_of(data)[layer * 5 + head, word[0], finding.key]
            assert stored == hundredths(finding.value)


def test_a_long_text_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(_report, "MOST_WEIGHTS", 10 * 31 * 32 // 2)
    look = make(LONG)
    html = render_report(look, "1")
    page = Page(html)
    data = data_of(page)
    assert 25 < len(data["words"]) <= 31
    columns = look.columns(len(data["words"]) - 1)
    assert data["words"] == [look.seen.words[i].label for i in columns]
    assert {0, *look.ends} <= set(columns) and data["breaks"] == look.breaks(columns) != []
    assert f"This page holds the {look.part(columns)}" in html and look.part(columns).capitalize() in html
    expected = look.seen.weights.astype(float).reshape(10, 150, 150)[:, columns][:, :, columns]
    assert (weights_of(data) == np.floor(expected * 100 + 0.5)).all()


def test_sentences_about_words_that_are_not_on_the_page_are_no_links(monkeypatch):
    look = make(LONG + " " + SHORT)
    for most in (12, 30, 60):
        monkeypatch.setattr(_report, "MOST_WEIGHTS", 10 * most * (most + 1) // 2)
        page = Page(render_report(look, "1"))
        data = data_of(page)
        links = {page.texts[i]: a["href"] for i, (tag, a) in enumerate(page.elements) if tag == "a"}
        columns = look.columns(len(data["words"]) - 1)
        first = next(f for f in look.findings if f.layer is not None)
        assert first.sentence in links
        for finding in look.findings:
            if finding.query is not None:
                assert (finding.sentence in links) == ({finding.query, finding.key} <= set(columns))
        for href in links.values():
            layer, head, word = map(int, href[1:].split("."))
            assert weights_of(data)[layer * 5 + head, word].max() >= 30  # the word that opens looks at something here


def test_each_layer_is_a_row_of_small_maps_and_words_elsewhere_belong_to_one_head():
    page = Page(render_report(make(rows=(3, 9)), "1"))
    places = [(a["style"], a["data-layer"], a["data-head"]) for _, a in page.of_class("tile")]
    assert places == [(f"grid-area: {i + 1} / {j + 1}", str(i), str(j)) for i in range(2) for j in range(5)]
    assert page.of_class("outside") and 'querySelectorAll(".outside")' in _report._asset("report.js")


def test_roles_and_rules_are_told():
    html = render_report(make(), "1")
    assert "previous token" in html and "4080 tokens" in html
    assert "broad: at least .80 of the largest possible entropy, on held-out text" in html
    assert "were not measured" in render_report(make(roles=False), "1")
