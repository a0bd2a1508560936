"""The real client in headless Chromium against the real server: its policy, its token, two pages, and its end."""

from __future__ import annotations

import shutil
import urllib.parse

import pytest

import saccade

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TEXT = "The </script><img src=x onerror=alert(1)> hen & the \u202efox\u202c met \u0007 the owl because it was soft."


@pytest.fixture(scope="module")
def viewer():
    with saccade.view(TEXT, block=False, browser=False, head=(1, 2)) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """A page, and what it asked for and complained of."""

    def __init__(self, browser, **options):
        self.page = browser.new_page(**options)
        self.asked, self.complaints = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def open(self, url):
        with self.page.expect_response("**/api/tile"):
            self.page.goto(url)
        self.page.wait_for_load_state("networkidle")
        return self


@pytest.mark.parametrize("size", [(1280, 800), (390, 800)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_keeps_its_policy_and_asks_nobody_else(viewer, browser, size, scheme):
    options = {"viewport": dict(zip(("width", "height"), size, strict=True)), "color_scheme": scheme}
    shown = Page(browser, **options).open(viewer.url)
    assert shown.complaints == []
    origin = urllib.parse.urlsplit(viewer.url).netloc
    assert {urllib.parse.urlsplit(url).netloc for url in shown.asked} == {origin}
    assert any(url.endswith("/api/words") for url in shown.asked)
    text = shown.page.evaluate("document.getElementById('saccade').firstElementChild.shadowRoot.textContent")
    assert "<img src=x onerror=alert(1)>" in text and "\u202e" not in text + shown.page.title()
    wide = shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wide
    shown.page.close()


def test_without_its_token_the_page_is_a_sentence(viewer, browser):
    page = browser.new_page()
    response = page.goto(viewer.url.partition("?")[0])
    assert response.status == 403 and "Open the whole address" in page.inner_text("body")
    page.close()


def test_two_pages_show_what_each_asks_for(viewer, browser):
    one, two = Page(browser), Page(browser)
    one.open(viewer.url)
    two.open(viewer.url)
    assert one.complaints == two.complaints == []
    one.page.close()
    with two.page.expect_response("**/api/tile") as tile:
        two.page.reload()
    assert tile.value.status == 200
    two.page.close()


def test_a_page_of_another_server_reads_nothing(viewer, browser):
    """Another viewer's page has another origin, and knows the token here."""
    with saccade.view("A stranger.", block=False, browser=False) as stranger:
        page = Page(browser).open(stranger.url).page
        base, _, token = viewer.url.partition("/?token=")
        ask = "([url, token]) => fetch(url, {method: 'POST', body: '{}', headers: {'X-Saccade-Token': token}})"
        ask += ".then(() => 'read', () => 'refused')"
        assert page.evaluate(ask, [f"{base}/api/open", token]) == "refused"
        own, _, token = stranger.url.partition("/?token=")
        assert page.evaluate(ask, [f"{own}/api/open", token]) == "read"
        page.close()


def test_when_the_server_has_ended_the_page_says_so(browser):
    with saccade.view("The hen met the fox.", block=False, browser=False) as viewer:
        page = Page(browser).open(viewer.url).page
    page.locator("#saccade select").nth(1).select_option(index=0)  # another head needs another tile
    page.get_by_text("does not answer").first.wait_for(timeout=10_000)
    page.close()
