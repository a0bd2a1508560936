"""Every key of the viewer's help acts or says why not, on a short text and on one above the limit of steps."""

from __future__ import annotations

import re

import pytest

import saccade
from saccade.viewer.server import _steps
from saccade.viewer.server._view import open_session, start

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = "The hen met the fox, and the owl met the hen because it was soft."
ARROWS = ["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp"]
# What the help lists, as the keys that are pressed one after the other; the last ones of each are at an end.
HELP = {
    "wheel, pinch, + − 0": ["+", "=", "-", "-", "-", "0", *["+"] * 9],
    "arrow keys": [*ARROWS, "End", "ArrowRight", "Control+Home", "ArrowUp", "ArrowLeft"],
    "Enter, Space": ["ArrowDown", "Enter", " "],
    "[ ] { }": ["[", "]", "]", *["["] * 3, "{", "{", *["}"] * 4],
    "arrow keys, Page up, Page down, Home, End": [
        *ARROWS,
        "PageDown",
        "PageUp",
        *"End ArrowRight Home ArrowLeft".split(),
    ],
    "Escape": ["Escape"],
    "x": ["x", "x"],
    "/": ["/"],
    "?": ["?"],
}
MAP, TILE, WORD = "canvas.picture", ".head[data-head='3 1']", ".flow .w:nth-of-type(3)"
PLACES = {
    MAP: ("arrow keys", "Enter, Space", "Escape", "x"),
    TILE: ("arrow keys, Page up, Page down, Home, End", "wheel, pinch, + − 0", "[ ] { }", "x", "/", "?"),
    WORD: ("arrow keys, Page up, Page down, Home, End", "Escape", "[ ] { }", "x"),
}
# All that a user sees of what a key does, a complaint told anew being news.
SEEN = """() => { const root = document.querySelector("#saccade > div").shadowRoot;
    const focus = root.activeElement, said = root.querySelector(".complaint");
    const crossed = [...root.querySelectorAll(".h-off")].map((tile) => tile.dataset.head);
    return JSON.stringify([location.hash, root.querySelector(".reading").innerText, crossed,
        focus && [focus.tagName, focus.dataset.t, focus.dataset.head], root.querySelector("dialog[open]") !== null,
        said.hidden ? "" : said.innerText]); }"""
CLEAR = """() => { document.querySelector("#saccade > div").shadowRoot.querySelector(".complaint").hidden = true; }"""


def opened(browser, viewer):
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.goto(viewer.url)
    page.locator(TILE).wait_for()
    page.wait_for_load_state("networkidle")
    return page


def acts(page, key):
    """Whether anything that a user sees changes within a second; the address follows after a quarter of one."""
    page.evaluate(CLEAR)
    page.wait_for_timeout(350)
    before = page.evaluate(SEEN)
    page.keyboard.press(key)
    for _ in range(20):
        if page.evaluate(SEEN) != before:
            return True
        page.wait_for_timeout(50)
    return False


@pytest.mark.parametrize("limit", [None, 7], ids=["short", "above the limit"])
def test_every_key_acts_or_the_page_says_why_not(browser, monkeypatch, limit):
    """On 3,744 tokens `x` did nothing, and after a click on a small map neither did ] and }."""
    if limit is not None:
        monkeypatch.setattr(_steps, "MOST_STEPS", limit)
    silent = []
    with start(open_session(TEXT, head=(1, 2))) as viewer:
        page = opened(browser, viewer)
        page.get_by_role("button", name="Help").click()
        listed = page.get_by_role("dialog").locator("dt").all_inner_texts()
        page.keyboard.press("Escape")
        by_mouse = {"drag", "click, Enter", "with Shift, Ctrl"}
        assert set(listed) == {*HELP} | by_mouse, "a key of the help that this test does not press"
        for place, own in PLACES.items():
            for name in own:
                page.goto("about:blank")
                page.goto(f"{viewer.url}#run=0&call=1&head=2&row=3")
                page.locator(place).first.click()
                for number, key in enumerate(HELP[name]):
                    if place == TILE and key.startswith("Page"):
                        continue  # scrolls the panel, as browsers do
                    if not acts(page, key):
                        silent.append((place, key, number))
        page.close()
    assert silent == []


def test_above_the_limit_both_tabs_and_x_say_how_long_the_text_is(browser, monkeypatch):
    """The tab spoke of a saved page, and the key said nothing."""
    monkeypatch.setattr(_steps, "MOST_STEPS", 7)
    with start(open_session(TEXT)) as viewer:
        page = opened(browser, viewer)
        tokens = viewer.session.runs[0].sides["text"].tokens
        why = re.compile(rf"at most 7 tokens, and this has {tokens}: view a part of it \(--from, --to\)")
        page.locator(TILE).click()
        page.keyboard.press("x")
        page.locator(".complaint").filter(has_text=why).wait_for()
        page.keyboard.press("]")
        page.locator(".complaint").wait_for(state="hidden", timeout=2000)  # it is of the key before
        for tab in ("Step", "Heads off"):
            page.get_by_role("tab", name=tab).click()
            page.get_by_role("tabpanel").filter(has_text=why).locator("visible=true").wait_for()
        page.close()


def test_a_panel_that_waits_counts_the_seconds(browser):
    """`x` showed an empty panel for as long as the model read the text."""
    with saccade.view(TEXT, block=False, browser=False) as viewer:
        page = opened(browser, viewer)
        held = []
        page.route("**/api/heads", lambda route: held.append(route))
        done = b'{"done":3,"total":32,"buffers":[]}'
        frame = len(done).to_bytes(4, "little") + done
        page.route(
            "**/api/progress",
            lambda route: route.fulfill(content_type="application/octet-stream", body=frame + bytes(-len(frame) % 8)),
        )
        page.locator(TILE).click()
        page.keyboard.press("x")
        waits = page.get_by_text(re.compile(r"^Working, [1-9] s: 3 of 32 heads$"))
        waits.wait_for()
        for route in held:
            route.continue_()
        page.unroute_all()
        waits.wait_for(state="detached")
        page.get_by_role("table", name="Loss of the text").wait_for()
        page.close()
