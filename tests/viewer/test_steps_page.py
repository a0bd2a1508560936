"""The page of steps: one file, offline, escaped; and in a browser the numbers that numpy says."""

from __future__ import annotations

import html
import json
import re

import numpy as np
import pytest
import torch

import saccade
from saccade.inspection import example, step_of_call
from saccade.operator._call import AttentionCall
from saccade.viewer import framed_steps, render_steps

TEXT = "The cat sat on the mat because it was soft."
NASTY = "</script><script>document.title = 'run'</script> <img src=x onerror=alert(1)> it & 'that' \" was"


@pytest.fixture(scope="module")
def steps():
    return saccade.step(TEXT, (1, 4), "it")


def data_of(page):
    return json.loads(
        re.search(r'<script type="application/json" id="steps-of-this-page">(.*?)</script>', page, re.DOTALL)[1]
    )


def test_the_page_holds_everything_and_loads_nothing(steps):
    page = render_steps(steps)
    assert data_of(page) == json.loads(json.dumps(steps.as_json()))
    assert page.startswith("<!doctype html>") and 'content="Saccade' in page[:400]
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", page.split('<script type="module">')[0])
    assert "default-src 'none'" in page
    assert html.unescape(re.search(r"<noscript><pre>(.*?)</pre>", page, re.DOTALL)[1]) == str(steps)


def test_a_text_full_of_html_stays_text():
    steps = saccade.step(NASTY, (0, 0), "it")
    page = render_steps(steps)
    assert page.count("<script") == 2 and page.count("</script>") == 2 and "<img" not in page
    assert data_of(page)["text"] == NASTY
    frame = framed_steps(steps)
    assert frame.count("<") == 2 and 'sandbox="allow-scripts"' in frame
    assert html.unescape(re.search('srcdoc="(.*?)"', frame, re.DOTALL)[1]) == page


def test_the_script_is_small_and_asks_for_nothing():
    script = render_steps(example()).split('<script type="module">')[1]
    assert len(script.encode()) < 30_000
    assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\b|fetch\(|XMLHttpRequest|WebSocket|import\(", script)


# In a browser


@pytest.fixture
def opened(browser, tmp_path):
    asked, errors, contexts = [], [], []

    def go(steps, *, width=1200, theme="light", fragment="", touch=False):
        path = tmp_path / "step.html"
        path.write_text(steps.html(), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=theme, has_touch=touch)
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector(".steps")
        return page

    yield go
    for context in contexts:
        context.close()
    assert errors == [] and [url for url in asked if not url.startswith(("file:", "data:"))] == []


def weights_on(page):
    """By key, as the bars' numbers say."""
    found = page.eval_on_selector_all(".weights [data-key]", "all => all.map(e => [e.dataset.key, e.textContent])")
    return {int(key): float(text) if text != "NaN" else np.nan for key, text in found}


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def near(page, expected):
    shown = weights_on(page)
    assert shown and all(abs(value - expected[key]) <= 5.1e-4 for key, value in shown.items())


@pytest.mark.slow
def test_switches_change_the_weights_to_what_numpy_says(opened, steps):
    page = opened(steps)
    scores = steps.scores
    visible, d, unplaced = scores.visible, scores.products, scores.unplaced
    masked = np.where(visible, d, -np.inf)
    near(page, softmax(masked * scores.scale))

    def turn(name):
        page.get_by_role("group", name="Leave parts out").get_by_label(f"without {name}", exact=True).click()

    turn("scale")
    near(page, softmax(masked))
    turn("mask")
    near(page, softmax(d))
    turn("positions")
    near(page, softmax(unplaced))
    turn("scale")
    near(page, softmax(unplaced * scores.scale))
    turn("mask"), turn("positions")
    slider = page.get_by_label("Scale", exact=True)
    for position, scale in ((0, 0.0), (250, scores.scale / 2), (1000, 1.0)):
        slider.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", position)
        near(page, softmax(np.where(visible, d * scale, -np.inf)))
    assert page.locator(".s-told").inner_text().startswith("'sat' has 1.00 and not 0.79")
    # Without the shift, in float16, exp of 30.97 is inf; in float32 it is not.
    turn("softmax shift")
    near(page, softmax(masked))
    page.get_by_label("numbers in").select_option("float16")
    assert any(np.isnan(value) for value in weights_on(page).values())
    assert "exp overflows in float16" in page.locator(".s-told").inner_text()


@pytest.mark.slow
def test_a_box_is_ticked_where_its_part_is_left_out(opened, steps):
    page = opened(saccade.step(TEXT, (1, 4), "it", without=["mask"]), fragment="#scale")
    boxes = page.get_by_role("group", name="Leave parts out").get_by_role("checkbox")
    ticked = [box.is_checked() for box in boxes.all()]
    assert ticked == [False, True, False, False]  # scale, mask, positions, softmax shift
    near(page, softmax(steps.scores.products * steps.scores.scale))
    button = page.locator("button.switch")
    assert button.inner_text() == "Leave out: scale" and button.get_attribute("aria-pressed") == "false"
    button.click()
    assert page.get_by_label("without scale").is_checked() and button.inner_text() == "Back with: scale"
    slider = page.get_by_label("Scale", exact=True)
    for position, expected in ((500, False), (1000, True), (250, False)):  # the model's own, 1, and half the model's
        slider.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", position)
        assert page.get_by_label("without scale").is_checked() == expected


@pytest.mark.slow
def test_keys_that_the_mask_will_hide_say_so(opened, steps):
    page = opened(steps, fragment="#dot")
    visible = steps.scores.visible

    def marked():
        rows = page.locator(".s-panel tbody tr").all_inner_texts()
        return [f"hidden in step {steps.hidden_in}" in row for row in rows]

    assert steps[steps.steps[steps.hidden_in - 1].id].id == "mask"
    assert marked() == [not seen for seen in visible]
    box = page.locator(".diagram button", has_text="dot product")
    seen = max(np.flatnonzero(visible), key=lambda j: steps.scores.products[j])
    assert steps.labels[seen] in box.locator(".most").inner_text()  # the largest of those that count
    assert box.locator(".bars i.pale").count() == (~visible).sum()
    page.get_by_label("without mask").click()
    assert not any(marked()) and box.locator(".bars i.pale").count() == 0
    assert steps.labels[steps.scores.products.argmax()] in box.locator(".most").inner_text()
    page.get_by_label("without mask").click()
    for _ in range(2):  # the mask itself, where it is done
        page.keyboard.press("ArrowRight")
    assert page.locator(".s-panel h3").inner_text() == "Mask" and not any(marked())
    assert page.locator("header .summary").inner_text() == steps.summary


@pytest.mark.slow
def test_rounding_without_the_shift_is_that_of_numpy(opened):
    page = opened(saccade.step(TEXT, (1, 4), "it", without=["shift"]))
    logits = saccade.step(TEXT, (1, 4), "it").scores.logits()
    page.get_by_label("numbers in").select_option("float16")
    with np.errstate(over="ignore"):
        exponentials = np.exp(logits.astype(np.float16))
        total = np.float16(exponentials.astype(np.float64).sum())
    near(page, (exponentials / total).astype(np.float64))


@pytest.mark.slow
def test_arrow_keys_buttons_and_links(opened, steps):
    page = opened(steps, fragment="#softmax")
    names = [step.name for step in steps]

    def shown():
        current = page.locator("[aria-current=step]")
        assert current.count() == 1
        assert (
            page.locator(".place").inner_text()
            == f"Step {names.index(page.locator('.s-panel h3').inner_text()) + 1} of 13"
        )
        return page.locator(".s-panel h3").inner_text()

    assert shown() == "Softmax"
    page.keyboard.press("ArrowRight")
    assert shown() == "Weighted sum of values" and page.url.endswith("#sum")
    page.keyboard.press("ArrowLeft"), page.keyboard.press("ArrowLeft")
    assert shown() == "Mask"
    page.keyboard.press("Home")
    assert shown() == names[0] and page.get_by_role("button", name="Previous step").is_disabled()
    page.keyboard.press("ArrowLeft")
    assert shown() == names[0]
    page.get_by_role("button", name="Next step").click()
    assert shown() == names[1]
    page.keyboard.press("End")
    assert shown() == names[-1]
    page.locator(".diagram button", has_text="dot product").click()
    assert shown() == "Dot product"
    page.get_by_label("Scale", exact=True).focus()
    page.keyboard.press("ArrowRight")  # moves the slider, not the steps
    assert shown() == "Dot product"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 1400])
def test_every_step_fits_its_screen(opened, theme, width):
    page = opened(saccade.step(NASTY, (1, 4), "it"), width=width, theme=theme, touch=width == 390)
    assert page.title().startswith("Head 1.4") and page.locator("img").count() == 0
    assert NASTY in page.locator("header q").inner_text()
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(17, 18, 22)"
    assert dark == (theme == "dark")
    for _ in range(13):
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide[0] <= wide[1]
        formula = page.locator(".formula math").first
        assert formula.bounding_box()["height"] > 10 and page.locator(".formula").get_attribute("aria-label")
        box, flow = page.locator("[aria-current=step]").bounding_box(), page.locator(".s-flow").bounding_box()
        assert flow["x"] - 2 <= box["x"] + 60 and box["x"] <= flow["x"] + flow["width"]  # its box is in view
        page.keyboard.press("ArrowRight")


@pytest.mark.slow
def test_a_screen_reader_finds_names_and_values(opened, steps):
    page = opened(steps, fragment="#softmax")
    assert page.get_by_role("table", name="Softmax").get_by_role("row").count() == 14
    assert page.get_by_role("navigation", name="Steps").count() == 1
    assert page.get_by_role("math", name=steps["softmax"].formula).count() == 1
    assert page.get_by_role("list", name="Weights").get_by_role("listitem").count() == 13
    unnamed = page.eval_on_selector_all(
        "button, input, select", "all => all.filter(e => !(e.ariaLabel || e.textContent || e.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.slow
def test_the_example_and_an_encoder_work_too(opened):
    page = opened(example())
    near(page, np.array([0.669762, 0.330238]))
    assert page.get_by_role("checkbox").count() == 2  # scale and shift: neither mask nor positions


@pytest.mark.slow
def test_many_keys_are_folded_and_still_exact(opened):
    rng = np.random.default_rng(4)
    query, key, value = (torch.tensor(rng.normal(size=(1, 1, n, 8))) for n in (1, 3001, 3001))
    call = AttentionCall(query, key, value, scale=2.0).observed(
        saccade.attention(query, key, value, scale=2.0), "by hand"
    )
    page = opened(step_of_call(call, 0, 0), fragment="#softmax")
    scores = (query @ key.mT)[0, 0, 0].numpy()
    near(page, softmax(2 * scores))
    assert set(np.argsort(-scores)[:4]) <= set(weights_on(page)) and len(weights_on(page)) == 16
    page.get_by_label("without scale", exact=True).click()
    near(page, softmax(scores))
    shown = page.get_by_role("table", name="Softmax").get_by_role("row").nth(1).get_by_role("cell").last.inner_text()
    first = min(weights_on(page))
    assert float(shown) == pytest.approx(softmax(scores)[first], abs=5.1e-4)
    page.keyboard.press("ArrowLeft"), page.keyboard.press("ArrowLeft")
    row = page.get_by_role("table", name="Scale").get_by_role("row").nth(1).get_by_role("cell").all_inner_texts()
    np.testing.assert_allclose(
        [float(x.replace("\u2212", "-")) for x in row], [scores[first], scores[first]], atol=5e-4
    )
