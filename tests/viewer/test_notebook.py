"""A look in a notebook."""

from __future__ import annotations

import html
import re

from looks import LONG, SHORT, make

from saccade.viewer import _report, framed, render_report

NASTY = "</script></iframe><script>alert(1)</script> <b>&amp; \"quoted\" 'single'"


def attributes(shown):
    """(title, sandbox, page) of the one element, in which nothing ends an attribute or begins another element."""
    match = re.fullmatch("<iframe " + r'(\w+)="([^"<>]*)" ' * 3 + r'style="[^"<>]*"></iframe>', shown)
    assert match and match.groups()[::2] == ("title", "sandbox", "srcdoc")
    return [html.unescape(value) for value in match.groups()[1::2]]


def test_the_report_stands_in_a_frame_of_its_own():
    for text in (SHORT, NASTY):
        look = make(text)
        _, sandbox, page = attributes(look._repr_html_())
        assert page == render_report(look, "in a notebook")
        assert sandbox == "allow-scripts"  # without allow-same-origin a script does not reach the notebook


def test_a_long_text_keeps_a_notebook_small(monkeypatch):
    look = make(LONG, layers=3)
    whole = framed(look)
    monkeypatch.setattr(_report, "MOST_IN_NOTEBOOK", 15 * 31 * 32 // 2)
    _, _, page = attributes(framed(look))
    assert len(page) < len(attributes(whole)[2]) and "This page holds the words" in page


def test_its_text_is_one_short_line():
    for text in (SHORT, LONG, NASTY * 4):
        shown = repr(make(text))
        assert "\n" not in shown and len(shown) < 160, shown
    assert repr(make(SHORT)).startswith("<Look at 'The cat sat on the mat, and the [...]': 15 words, ")
