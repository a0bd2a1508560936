"""The real client in headless Chromium against the real server: its policy, its token, two pages, and its end."""

from __future__ import annotations

import base64
import os
import queue
import urllib.parse

import numpy as np
import pytest
import torch

import saccade
from saccade.intervention import Ablate, Scale
from saccade.viewer.server import _serve
from saccade.viewer.server._view import open_session, start
from saccade.viewer.server._widget import make_widget

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
TEXT = "The </script><img src=x onerror=alert(1)> hen & the \u202efox\u202c met \u0007 the owl because it was soft."


@pytest.fixture(scope="module")
def viewer():
    with saccade.view(TEXT, block=False, browser=False, head=(1, 2)) as viewer:
        yield viewer


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
    asked = [url.removeprefix("blob:") for url in shown.asked]  # a script that came through the client's channel
    assert {urllib.parse.urlsplit(url).netloc for url in asked} == {origin}
    assert any(url.endswith("/api/words") for url in shown.asked)
    text = shown.page.evaluate("document.getElementById('saccade').firstElementChild.shadowRoot.textContent")
    assert "<img src=x onerror=alert(1)>" in text and "\u202e" not in shown.page.title()
    wide = shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert wide
    shown.page.close()


@pytest.mark.skipif(os.name != "posix", reason="the whole address is an argument there")
def test_the_file_of_the_address_becomes_the_page(viewer, browser, monkeypatch, tmp_path):
    opened = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(_serve, "open_browser", lambda url: opened.append(url) or True)
    assert viewer.open_browser()
    [url] = opened
    shown = Page(browser)
    with shown.page.expect_response("**/api/tile"):
        shown.page.goto(url)
    shown.page.wait_for_url(viewer.url)
    assert url != shown.page.url == viewer.url and shown.complaints == []
    shown.page.close()


INJECTED = """() => {
  window.ran = [];
  const element = document.createElement("div");
  element.innerHTML = `<img src="data:," onerror="ran.push('attribute')"><a href="javascript:ran.push('link')">x</a>
    <iframe srcdoc="<script>parent.ran.push('frame')</script>"></iframe>`;
  const inline = document.createElement("script");
  inline.textContent = "ran.push('script')";
  const other = document.createElement("script");
  other.src = "http://stranger.test/x.js";
  const base = Object.assign(document.createElement("base"), { href: "http://stranger.test/" });
  const form = Object.assign(document.createElement("form"), { action: "http://stranger.test/" });
  document.body.append(element, inline, other, base, form);
  element.querySelector("a").click();
  form.submit();
  return fetch("http://stranger.test/").then(() => ran.push("fetch"), () => {})
    .then(() => new Promise((done) => setTimeout(() => done([ran, document.baseURI]), 500)));
}"""


def test_a_script_that_a_text_might_bring_in_does_not_run(viewer, browser):
    """Were something of the text ever taken as HTML, the policy of the page would stop it."""
    shown = Page(browser).open(viewer.url)
    refusals = []
    shown.page.on("requestfailed", lambda request: refusals.append((request.url, request.failure)))
    ran, base = shown.page.evaluate(INJECTED)
    assert ran == [] and base == shown.page.url == viewer.url
    told = " ".join(shown.complaints)
    for refused in (
        "inline script",
        "inline event handler",
        "stranger.test/x.js",
        "base-uri",
        "form-action",
        "connect-src",
    ):
        assert refused in told, told
    assert set(refusals) == {("http://stranger.test/x.js", "csp")}
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


def test_what_is_saved_does_not_hold_the_token(viewer, browser, tmp_path):
    page = Page(browser).open(viewer.url).page
    token = urllib.parse.parse_qs(urllib.parse.urlsplit(viewer.url).query)["token"][0]
    page.get_by_role("button", name="Save", exact=True).click()
    with page.expect_download(timeout=120_000) as download:
        page.locator("[data-save=HTML]").click()
    download.value.save_as(tmp_path / "saved.html")
    saved = (tmp_path / "saved.html").read_text("utf-8")
    assert "mountRecorded" in saved or "saccade-recorded" in saved
    assert token not in saved and token not in page.evaluate("location.hash")
    again = browser.new_page()
    again.goto((tmp_path / "saved.html").as_uri())
    again.get_by_role("searchbox", name="Search what is saved").fill("hen")
    again.get_by_text("1 of 1 place").wait_for()
    again.get_by_role("tab", name="Heads off").click()
    again.get_by_text("This needs the model, not a saved page").locator("visible=true").wait_for()
    again.close()
    page.close()


def losses_of(page, now):
    """Both losses and their difference, once the second is `now`."""
    cells = page.get_by_role("table", name="Loss of the text").locator("tbody tr").first.locator("td")
    cells.nth(1).filter(has_text=f"{now:.2f}").wait_for()
    return [float(text.replace("\u2212", "-")) for text in cells.all_inner_texts()]


def test_a_head_is_switched_off_and_the_text_shows_what_it_did(browser):
    """Against the model itself with the head ablated; words that lose probability are marked, and only those."""
    session = open_session(TEXT, head=(1, 2))
    reader = session.runs[0].source
    ids = reader.whole(reader.encode(TEXT).ids)
    found = []
    with torch.no_grad():
        for edits in ({"*": Scale(None, 1.0)}, {0: Ablate([4, 5]), 1: Ablate([3])}):
            with saccade.intervene(reader.module, edits):
                found.append(reader.module(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
    before, after = (-float(one.mean()) for one in found)
    change = (found[1] - found[0]).tolist()
    with start(session) as viewer:
        shown = Page(browser, viewport={"width": 1300, "height": 900}).open(viewer.url)
        page = shown.page
        tile = page.locator(".head[data-head='3 1']")
        tile.focus()
        page.keyboard.press("x")
        page.get_by_role("tab", name="Heads off", selected=True).wait_for()
        for head in ("4 0", "5 0"):
            page.locator(f".head[data-head='{head}']").focus()
            page.keyboard.press("x")
        assert losses_of(page, after) == pytest.approx([before, after, after - before], abs=0.006)
        assert tile.get_attribute("aria-label").endswith(", off") and "h-off" in tile.get_attribute("class")
        words = page.locator(".h-word")
        single = [word for word in session.runs[0].sides["text"].words if word.last - word.first == 1][1:]
        for number, word in enumerate(session.runs[0].sides["text"].words):
            if word in single and abs(change[word.first - 1]) > 0.001:
                assert ("h-less" in words.nth(number).get_attribute("class")) == (change[word.first - 1] < 0)
        words.nth(3).focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        chosen = page.locator(".h-word[aria-current=true]").filter(has_text=words.nth(4).inner_text())
        chosen.wait_for()
        assert page.locator(".h-said").inner_text() == chosen.get_attribute("aria-label")
        assert " nats: from " in chosen.get_attribute("aria-label")
        assert page.get_by_role("heading", name="The most likely tokens after").inner_text().endswith("‘script’")
        page.get_by_role("button", name="Switch layer 1 head 3 on").click()
        assert "off" not in tile.get_attribute("aria-label")
        page.get_by_role("button", name="All on").click()
        assert losses_of(page, before) == pytest.approx([before, before, 0], abs=0.006)
        page.get_by_label("Colour by").select_option("worth")
        tile.locator(".h-worth").wait_for()
        slopes = np.frombuffer(session.reply("importance", {"run": "0"}).buffers[0], "<f4").reshape(4, 8)
        worth = float(tile.locator(".h-worth").inner_text().replace("\u2212", "-"))
        assert worth == pytest.approx(-slopes[1, 3], abs=0.006)
        assert shown.complaints == []
        page.close()


def test_patching_from_another_text_is_a_map_of_the_heads(browser):
    text = "Mr. Brown spoke to Miss Green, and Miss"
    other = text.replace("Green", "Price")
    with saccade.view(text, block=False, browser=False) as viewer:
        shown = Page(browser).open(viewer.url)
        page = shown.page
        page.get_by_role("tab", name="Heads off").click()
        field = page.get_by_label("Other text", exact=True)
        assert field.input_value() == text
        field.fill(f"{text} Green")
        field.press("Enter")
        assert "and the texts have 14 and 17 tokens" in page.locator(".h-patch [role=alert]").inner_text()
        field.fill(other)
        page.get_by_label("Measured").select_option("exact")
        page.get_by_role("button", name="Patch the heads").click()
        cells = page.get_by_role("table", name="What each head restores").get_by_role("button")
        cells.nth(31).wait_for()
        told = {"run": "0", "other": other, "target": "", "positions": "", "by": "exact"}
        effects = np.frombuffer(open_session(text).reply("patching", told).buffers[0], "<f4")
        found = [float(cell.replace("\u2212", "-")) for cell in cells.all_inner_texts()]
        assert found == pytest.approx(effects.tolist(), abs=0.0051)
        assert page.locator(".h-patch").inner_text().count("Head 1.1 restores most") == 1
        cells.nth(9).focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Switch off layer 2 head 1").wait_for()
        [refused] = shown.complaints
        assert "400" in refused
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_heads_do_fits_a_telephone(viewer, browser, scheme):
    shown = Page(browser, viewport={"width": 390, "height": 800}, color_scheme=scheme).open(viewer.url)
    page = shown.page
    page.get_by_role("tab", name="Heads off").click()
    own = page.get_by_role("button", name="Switch off layer 1 head 2")
    own.click()
    page.locator(".h-word.h-less").first.wait_for()
    page.get_by_label("Other text", exact=True).fill(TEXT.replace("soft", "dark"))
    page.get_by_role("button", name="Patch the heads").click()
    page.locator(".h-cell").first.wait_for()
    assert own.get_attribute("aria-pressed") == "true" and shown.complaints == []
    panel = page.locator("[data-panel=heads]")
    assert panel.evaluate("e => e.scrollWidth <= e.clientWidth")
    page.close()


def test_rows_and_steps_that_failed_are_asked_for_again(viewer, browser):
    page = Page(browser).open(viewer.url).page
    for op in ("rows", "script"):
        page.route(f"**/api/{op}", lambda route: route.abort())
    page.get_by_role("tab", name="Numbers").click()
    page.get_by_role("button", name="Rows", exact=True).click()
    page.get_by_role("alert").wait_for()
    with page.expect_request("**/api/script"):
        page.get_by_role("tab", name="Step").click()
    page.unroute_all()
    page.get_by_role("tab", name="Numbers").click()
    page.get_by_role("table", name="Rows").wait_for()
    page.get_by_role("tab", name="Step").click()
    page.get_by_role("heading", name="Weights", exact=True).wait_for()
    page.close()


def test_a_tile_that_failed_is_asked_for_again(browser):
    with saccade.view("The hen met the fox.", block=False, browser=False) as viewer:
        page = Page(browser).open(viewer.url).page
        failing = True
        page.route("**/api/tile", lambda route: route.abort() if failing else route.continue_())
        page.locator("#saccade select").nth(1).select_option(index=0)
        again = page.get_by_role("button", name="Try again")
        again.wait_for(timeout=15_000)
        failing = False
        with page.expect_response("**/api/tile") as tile:
            again.click()
        assert tile.value.status == 200
        again.wait_for(state="hidden")
        page.close()


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


def test_an_open_page_tells_that_it_is_open(viewer, browser):
    shown = Page(browser)
    shown.page.clock.install()
    shown.open(viewer.url)
    before = len([url for url in shown.asked if url.endswith("/api/alive")])
    shown.page.clock.run_for(95_000)
    shown.page.wait_for_load_state("networkidle")
    assert before and len([url for url in shown.asked if url.endswith("/api/alive")]) == before + 3
    shown.page.close()


def test_when_the_server_has_ended_the_page_says_so(browser):
    with saccade.view("The hen met the fox.", block=False, browser=False) as viewer:
        page = Page(browser).open(viewer.url).page
    page.locator("#saccade select").nth(1).select_option(index=0)  # another head needs another tile
    page.get_by_text("does not answer").first.wait_for(timeout=10_000)
    page.close()


NOTEBOOK = """<!doctype html><body><div id="cell"></div><script type="module">
import widget from "/client.js";
const listeners = [];
const model = {
  on: (event, listener) => { if (event === "msg:custom") listeners.push(listener); },
  off: () => {},
  get: () => undefined,
  send: async (content) => {
    const [message, parts] = await toKernel(content);
    const views = parts.map((part) => new DataView(Uint8Array.from(atob(part), (c) => c.charCodeAt(0)).buffer));
    listeners.forEach((listener) => listener(message, views));
  },
};
widget.render({ model, el: document.getElementById("cell") });
</script>"""


def test_the_widget_shows_the_same_in_a_notebook_without_a_port(browser, monkeypatch):
    """The page is a notebook's: what the client sends goes to the widget as the kernel hands it on."""
    pytest.importorskip("anywidget")
    import comm
    from comm.base_comm import BaseComm

    sent: queue.Queue = queue.Queue()

    class Kernel(BaseComm):
        def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
            if msg_type == "comm_msg" and data["method"] == "custom":
                sent.put((data["content"], [base64.b64encode(part).decode() for part in buffers or []]))

    def to_kernel(content):
        asked.append(content["op"])
        widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        return sent.get(timeout=20)

    monkeypatch.setattr(comm, "create_comm", Kernel)
    asked: list[str] = []
    widget = make_widget(open_session(TEXT))
    shown = Page(browser)
    shown.page.expose_function("toKernel", to_kernel)
    place = "http://notebook.test/"
    files = {place: ("text/html", NOTEBOOK), f"{place}client.js": ("text/javascript", widget._esm)}

    def give(route):
        kind, body = files[route.request.url]
        route.fulfill(content_type=kind, body=body)

    shown.page.route("**/*", give)
    shown.page.goto(place)
    shown.page.locator("#cell canvas").first.wait_for(timeout=20_000)
    shown.page.wait_for_timeout(1000)
    assert {"open", "tile", "words", "overview"} <= set(asked) and "alive" not in asked
    assert shown.complaints == [] and set(shown.asked) <= set(files)
    shown.page.close()
    widget.close()
