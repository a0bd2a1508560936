"""The report in a browser: nothing is cut, nothing lies on a line, and marks say what the sentence says."""

from __future__ import annotations

import pytest

import saccade
from saccade.inspection import look, open_model
from saccade.viewer import render_report

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_poison")]

TEXT = "I will go if you will go with me. She said it was cold, and he said it was warm."


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(look(open_model(), TEXT), saccade.__version__), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page.goto(address)
    yield page
    page.close()


def test_the_box_around_a_word_is_open_where_a_stop_touches_it(page):
    boxes = page.evaluate("""() => [...document.querySelectorAll('.w')].map((e, i, all) => {
      e.click();
      const box = getComputedStyle(e, '::before'), outer = e.getBoundingClientRect(), next = all[i + 1];
      const line = parseFloat(box.borderRightWidth), right = outer.right - parseFloat(box.right);
      const start = next && next.getBoundingClientRect();
      const beside = start && Math.abs(start.top - outer.top) < 9 && /^[.,]$/.test(next.textContent);
      return beside ? [e.textContent, line, right, start.left] : null;
    }).filter(Boolean)""")
    assert [word for word, *_ in boxes] == ["me", "cold", "warm"]
    for _, line, right, following in boxes:
        assert line == 0 and right <= following + 0.1


@pytest.mark.parametrize("width", range(300, 960, 30))
def test_no_role_is_cut_and_no_arrow_lies_on_a_divider(width, page):
    page.set_viewport_size({"width": width, "height": 844})
    roles = page.locator(".tile .role").evaluate_all("all => all.map(e => [e.scrollWidth, e.clientWidth])")
    assert len(roles) == 32 and all(inner <= outer for inner, outer in roles)
    links = page.locator(".findings a").evaluate_all("all => all.map(e => [e.scrollHeight, e.clientHeight])")
    assert links and all(inner <= outer for inner, outer in links)


def test_words_are_marked_from_the_weight_on_that_the_sentence_names(page):
    found = page.evaluate("""() => [...document.querySelectorAll('.tile')].flatMap((tile) => {
      tile.click();
      return [...document.querySelectorAll('.w')].map((e) => {
        e.click();
        const sentence = document.getElementById('reading').textContent, [from, by] = sentence.split('looked at by');
        const marks = (kind) => document.querySelectorAll(`.w.${kind}`).length;
        return [marks('from'), from.includes('nothing'), marks('by'), by === undefined || by.includes('nothing')];
      });
    })""")
    assert len(found) == 32 * 24
    for looks, at_nothing, looked, by_nothing in found:
        assert (looks == 0) == at_nothing and (looked == 0) == by_nothing
    assert any(by_nothing for *_, by_nothing in found) and not all(by_nothing for *_, by_nothing in found)
