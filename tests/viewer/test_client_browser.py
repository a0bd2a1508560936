"""The viewer's client in a browser, on synthetic numbers (`client/src/fake.ts`), without any network."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from urllib.parse import parse_qs

import pytest

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).parents[2] / "client"
BUILT = Path(__file__).parents[2] / "src" / "saccade" / "viewer" / "client.js"
SHORT = "run=1&call=0&head=2"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the client's sources, in which it is built: `client/`, as in the repository."""
    if not shutil.which("node"):
        pytest.skip("the client is built by node, which is not here")
    modules = CLIENT / "node_modules"
    if not (modules / "esbuild").is_dir():
        pytest.skip("the client's esbuild is not installed: npm install in client/")
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(CLIENT, root / "client", ignore=shutil.ignore_patterns("node_modules", "build"))
    (root / "client" / "node_modules").symlink_to(modules.resolve())
    (root / "src" / "saccade" / "viewer").mkdir(parents=True)
    return root / "client"


def run(copy, *command):
    ran = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_committed_client_is_what_its_sources_build(copy):
    run(copy, "node", "build.mjs")
    assert (copy.parent / "src/saccade/viewer/client.js").read_bytes() == BUILT.read_bytes(), "npm run build in client/"
    for script in ("steps/step.js", "heads.js"):
        built = copy.parent / "src/saccade/viewer" / script
        assert built.read_bytes() == (BUILT.parent / script).read_bytes(), "npm run build"


def test_the_client_is_small_and_names_no_address():
    text = BUILT.read_text("utf8")
    assert len(BUILT.read_bytes()) < 100_000
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
    }


def test_the_logic_passes_its_own_tests(copy):
    run(copy, "node", "build.mjs", "--test")
    run(copy, "node", "--test", *(str(path) for path in sorted((copy / "test").glob("*.test.mjs"))))


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("there is no Chromium here")
    api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(copy):
    run(copy, "node", "build.mjs", "--dev")
    return copy / "build" / "dev.html"


@pytest.fixture
def opened(browser, page_file):
    """Opens the page with a hash; at the end there must be no error and no request but for the page itself."""
    contexts, errors, requests = [], [], []

    def open_page(fragment="", width=1300, height=800, delay=0, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{page_file.as_uri()}?delay={delay}#{fragment}")
        page.locator(".reading").filter(has_text="keys").wait_for()
        page.wait_for_function(
            "() => document.querySelector('#saccade > div').shadowRoot.querySelector('.sign').hidden"
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests


def state(page):
    """The state in the URL, once it rests: it follows a change after a quarter of a second, later on a busy machine."""
    before, rested = None, 0
    while rested < 3:
        page.wait_for_timeout(250)
        now = page.evaluate("() => location.hash")
        before, rested = now, rested + 1 if now == before else 0
    return {key: values[0] for key, values in parse_qs(before.removeprefix("#")).items()}


def box(page):
    return page.locator("canvas.picture").bounding_box()


def pixels(page):
    """The canvas, (height, width, 4)."""
    import numpy as np

    text, height, width = page.evaluate("""() => {
        const c = document.querySelector('#saccade > div').shadowRoot.querySelector('canvas.picture');
        const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height), parts = [];
        for (let i = 0; i < data.length; i += 30000) parts.push(String.fromCharCode(...data.subarray(i, i + 30000)));
        return [btoa(parts.join("")), c.height, c.width]; }""")
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(height, width, 4)


def reading(page):
    return page.locator(".reading").inner_text()


def test_wheel_zooms_where_the_pointer_is_and_dragging_moves(opened):
    page = opened("run=0&call=1&head=3")
    assert "100,000 rows" in reading(page)
    around = box(page)
    x, y = around["x"] + around["width"] / 2, around["y"] + around["height"] / 2
    page.mouse.move(x, y)
    before = re.search(r"Rows (\d+)\D(\d+)", reading(page))
    for _ in range(12):
        page.mouse.wheel(0, -400)
    page.wait_for_timeout(300)
    after = re.search(r"Rows? .*?(\d+)", reading(page))
    assert int(before[1]) - 2 <= int(after[1]) <= int(before[2]) + 2, "the row under the pointer stays"
    zoomed = state(page)
    assert float(zoomed["scale"]) > 0.05
    page.mouse.down()
    page.mouse.move(x + 150, y + 90, steps=6)
    page.mouse.up()
    moved = state(page)
    assert float(moved["x"]) == pytest.approx(float(zoomed["x"]) - 150 / float(zoomed["scale"]), rel=1e-4)
    assert float(moved["y"]) == pytest.approx(float(zoomed["y"]) - 90 / float(zoomed["scale"]), rel=1e-4)
    page.get_by_role("button", name="Whole").click()
    assert "scale" not in state(page)


def test_hover_reads_word_weight_and_rank_and_a_click_chooses_the_word(opened):
    page = opened(SHORT)
    around = box(page)
    page.mouse.move(around["x"] + 200, around["y"] + 260)
    page.wait_for_function(
        "() => /rank \\d+ of 59/.test("
        "document.querySelector('#saccade > div').shadowRoot.querySelector('.reading').textContent)"
    )
    row = int(re.search(r"Row .*? \((\d+)\)", reading(page))[1])
    page.mouse.click(around["x"] + 200, around["y"] + 260)
    chosen = state(page)["row"]
    first, _, last = chosen.partition("-")
    assert int(first) <= row <= int(last or first)
    page.mouse.click(around["x"] + 40, around["y"] + 400)  # the row margin
    page.keyboard.down("Shift")
    page.mouse.click(around["x"] + 250, around["y"] + 60)  # the key margin takes the place of the rows
    page.mouse.click(around["x"] + 330, around["y"] + 60)
    page.keyboard.up("Shift")
    final = state(page)
    assert "row" not in final and "," in final["key"]


def test_every_value_is_reached_and_said_by_keys(opened):
    page = opened(SHORT)
    canvas, said = page.locator("canvas.picture"), page.locator("[role=status]")
    canvas.focus()
    assert canvas.get_attribute("aria-label") == "Attention map, Layer 0 head 2"
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "() => /Row .*\\(1\\) on key .*\\(1\\): weight 0\\.\\d+, rank \\d+ of 59/.test("
        "document.querySelector('#saccade > div').shadowRoot.querySelector('[role=status]').textContent)"
    )
    page.keyboard.press("End")
    page.wait_for_function(
        "() => /hidden by Padding/.test("
        "document.querySelector('#saccade > div').shadowRoot.querySelector('[role=status]').textContent)"
    )
    page.keyboard.press("Enter")
    assert "chosen" in said.inner_text()
    assert "row" in state(page)
    page.keyboard.press("]")
    page.keyboard.press("}")
    page.keyboard.press("+")
    moved = state(page)
    assert (moved["head"], moved["call"]) == ("3", "1") and float(moved["scale"]) > 0
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    final = state(page)
    assert "scale" not in final and "row" not in final
    page.keyboard.press("Tab")
    assert not page.evaluate(
        "() => document.activeElement.shadowRoot?.activeElement?.matches('canvas.picture') ?? false"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_and_the_override(opened, scheme):
    page = opened(SHORT, color_scheme=scheme)
    dark = scheme == "dark"
    assert (pixels(page)[2, -2, :3].mean() < 60) == dark
    page.locator(".top .choice", has_text="Colours").locator("select").select_option("light" if dark else "dark")
    page.wait_for_timeout(200)
    assert (pixels(page)[2, -2, :3].mean() < 60) != dark


@pytest.mark.parametrize("fragment", ["", SHORT])
def test_a_phone_shows_the_map_without_scrolling_sideways(opened, fragment):
    page = opened(fragment, width=390, height=780, has_touch=True)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    around = box(page)
    assert around["width"] >= 380 and around["height"] >= 250
    page.touchscreen.tap(around["x"] + 200, around["y"] + 250)
    assert "row" in state(page)


def test_the_map_has_the_colours_of_its_numbers(opened):
    """Hidden pairs are hatched, the diagonal of the previous-token head is the strongest colour, the rest is not."""
    page = opened("run=0&call=1&head=3&x=0&y=0&scale=20&tone=linear")
    image, around = pixels(page).astype(int), box(page)
    left, top = min(120, max(58, around["width"] * 0.13)), min(104, max(54, around["height"] * 0.15))

    def spot(row, key):
        x, y = int(left + (key + 0.5) * 20), int(top + (row + 0.5) * 20)
        return image[y - 4 : y + 5, x - 4 : x + 5, :3]

    previous, far, hidden = spot(12, 11), spot(12, 4), spot(12, 13)
    assert previous.std(axis=(0, 1)).max() == far.std(axis=(0, 1)).max() == 0
    assert hidden.std(axis=(0, 1)).max() > 3, "hatched"
    assert previous.mean() < far.mean() - 40


def test_two_maps_side_by_side_and_as_a_difference(opened):
    page = opened(SHORT)
    page.get_by_role("button", name="Compare").click()
    page.wait_for_timeout(300)
    assert state(page)["with"] == "side.2.2.0", "the same head of the next text"
    page.get_by_role("toolbar").get_by_label("with").select_option("3")
    page.get_by_role("button", name="Difference").click()
    assert state(page)["with"] == "difference.2.3.0", "of the other checkpoint"
    page.mouse.move(box(page)["x"] + 200, box(page)["y"] + 260)
    assert re.search(r"head 2 · both directions, later.*difference \S*[1-9]", reading(page))
    page.locator(".top .choice", has_text="Run").locator("select").select_option("3")
    page.mouse.move(box(page)["x"] + 201, box(page)["y"] + 260)
    assert state(page)["with"] == "difference.2.1.0", "they change places"
    page.get_by_role("toolbar").get_by_label("with").select_option("3")
    page.mouse.move(box(page)["x"] + 200, box(page)["y"] + 260)
    assert "difference 0.000" in reading(page)
    page.get_by_role("toolbar").get_by_label("with").select_option("0")
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
    assert "different length" in reading(page)


def test_two_fingers_zoom_and_one_moves(opened):
    page = opened("run=0&call=1&head=3", width=390, height=780, has_touch=True)
    around, touch = box(page), page.context.new_cdp_session(page)
    x, y = around["x"] + 200, around["y"] + 250

    def fingers(kind, *points):
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": a, "y": b} for a, b in points]})

    fingers("touchStart", (x - 20, y), (x + 20, y))
    for spread in range(20, 101, 10):
        fingers("touchMove", (x - spread, y), (x + spread, y))
    fingers("touchEnd")
    zoomed = state(page)
    whole = min((around["width"] - 58 - 18) / 100_000, 1)
    assert float(zoomed["scale"]) == pytest.approx(5 * whole, rel=0.02), "five times as far apart"
    assert "row" not in zoomed, "two fingers choose nothing"
    fingers("touchStart", (x, y))
    for step in range(0, 41, 10):
        fingers("touchMove", (x, y - step))
    fingers("touchEnd")
    moved = state(page)
    assert float(moved["y"]) == pytest.approx(float(zoomed["y"]) + 40 / float(zoomed["scale"]), rel=1e-3)
    assert moved["scale"] == zoomed["scale"] and "row" not in moved


def test_sampled_tiles_are_marked_until_the_exact_ones_come(opened):
    page = opened(SHORT, delay=150)
    page.evaluate("""() => {
        window.seen = new Set();
        const look = () => {
            const sign = document.querySelector('#saccade > div').shadowRoot.querySelector('.sign');
            if (!sign.hidden) window.seen.add(sign.textContent);
            requestAnimationFrame(look); };
        requestAnimationFrame(look); }""")
    page.locator(".top .choice", has_text="Run").locator("select").select_option("0")
    page.wait_for_timeout(300)
    page.wait_for_function("() => document.querySelector('#saccade > div').shadowRoot.querySelector('.sign').hidden")
    seen = page.evaluate("() => [...window.seen]")
    assert "computing" in seen
    assert any(re.fullmatch(r"from 1 row in \d+; computing", text) for text in seen), seen


def test_frames_while_panning_a_long_text(opened):
    page = opened("run=0&call=1&head=2&x=50000&y=50010&scale=0.5&tone=log", delay=5)
    around = box(page)
    x, y = around["x"] + 300, around["y"] + 300
    page.evaluate("""() => {
        const times = (window.times = []);
        const next = (now) => { times.push(now); if (times.length < 4000) requestAnimationFrame(next); };
        requestAnimationFrame(next); }""")
    page.mouse.move(x, y)
    page.mouse.down()
    for i in range(60):
        page.mouse.move(x + 4 * (i % 30), y - 3 * i)
    page.mouse.up()
    gaps = sorted(b - a for a, b in pairwise(page.evaluate("() => window.times")))
    rate = 1000 / gaps[len(gaps) // 2]
    print(f"{rate:.0f} frames a second while panning, at the median of {len(gaps)}")
    assert rate >= 30


def test_text_of_users_is_text(opened):
    page = opened(SHORT + "&row=1-3")
    page.locator("canvas.picture").focus()
    for key in ["Control+Home", "ArrowRight", "ArrowDown", "Enter"]:
        page.keyboard.press(key)
    page.wait_for_timeout(400)
    shown = page.locator(".saccade").inner_html()
    assert "<bdi>" in shown and "cat&lt;/script&gt;" in shown
    assert page.locator(".saccade script, .reading b b").count() == 0
    assert "cat</script>" in reading(page)
    assert page.locator(".title").get_attribute("title").startswith("The cat</script>")
