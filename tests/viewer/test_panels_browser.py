"""Panels and saved files of the viewer's client in a browser, on synthetic numbers, without any network."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from urllib.parse import parse_qs

import numpy as np
import pytest

pytestmark = pytest.mark.slow

SHORT = "run=1&call=0&head=3"  # 61 tokens, the last 21 of them generated, its last 2 keys are padding
LONG = "run=0&call=1&head=3"  # 100,000 tokens, causal
ROOT = "document.querySelector('#saccade > div').shadowRoot"
CROSS = "run=2&call=1&head=1"  # 53 query tokens, 47 key tokens


@pytest.fixture
def opened(browser, page_file):
    """Opens the page, or another file, offline; at the end no script has failed and nothing has been asked for."""
    contexts, errors, requests = [], [], []

    def open_page(fragment, file=page_file, width=1300, height=900, **options):
        context = browser.new_context(viewport={"width": width, "height": height}, offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"{file.as_uri()}?delay=0" + (f"#{fragment}" if fragment else ""))
        page.locator(".told").wait_for(state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests), requests


def saved(page, kind, tmp_path):
    """What "save as" gives, as a file."""
    page.get_by_role("button", name="Save", exact=True).click()
    with page.expect_download() as download:
        page.locator(f"[data-save={kind}]").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    page.keyboard.press("Escape")
    return path


def weights_of(page, tmp_path, rows, keys):
    """The map's numbers from the CSV, NaN where it has no line, and the words of rows."""
    lines = list(csv.DictReader(io.StringIO(saved(page, "CSV", tmp_path).read_text("utf-8-sig"), newline="")))
    out = np.full((rows, keys), np.nan)
    for line in lines:
        out[int(line["row"]), int(line["key"])] = float(line["weights"])
    return out, {int(line["row"]): line["row_word"] for line in lines}


def word(page, first):
    return page.locator(f".flow .w[data-t='{first}']").first


def spans(page):
    """First and end token of every word that is made, in order."""
    return page.locator(".flow .w").evaluate_all("all => all.map(e => [+e.dataset.t, +e.dataset.e])")


def told(page, pattern="looks at|look on"):
    page.locator(".told").filter(has_text=re.compile(pattern)).wait_for()
    return page.locator(".told").inner_text()


def shares(page, direction):
    """The list of the largest weights: words and numbers."""
    items = page.locator(f".shares .{direction} li")
    items.first.wait_for()
    return [(item.locator("bdi").inner_text(), float(item.locator(".number").inner_text())) for item in items.all()]


def state(page):
    page.wait_for_timeout(400)  # the hash follows after a quarter of a second
    return {key: values[0] for key, values in parse_qs(page.url.partition("#")[2]).items()}


def by_words(weights, rows, spans):
    """What some rows give each word on average, and what each word gives these keys, as sums over the keys."""
    from_words = np.array([np.nansum(weights[rows, a:b]) / len(rows) for a, b in spans])
    by_word = np.array([np.nansum(weights[a:b, rows]) / (b - a) for a, b in spans])
    return from_words, by_word


def falling(numbers, most=12):
    return sorted((n for n in numbers if n > 0), reverse=True)[:most]


def test_a_chosen_word_shows_the_map_s_own_numbers(opened, tmp_path):
    page = opened(f"{SHORT}&panel=text")
    weights, _ = weights_of(page, tmp_path, 61, 61)
    words = spans(page)
    assert words[0][0] == 0 and words[-1][1] == 61 and all(a[1] == b[0] for a, b in pairwise(words))
    for first, end in (words[3], words[12]):
        word(page, first).click()
        page.locator(f".w[data-t='{first}'][aria-pressed=true]").wait_for()
        page.wait_for_timeout(300)
        looks, looked = by_words(weights, list(range(first, end)), words)
        assert [n for _, n in shares(page, "from")] == pytest.approx(falling(looks), abs=0.0051)
        assert [n for _, n in shares(page, "by")] == pytest.approx(falling(looked), abs=0.0051)
        shaded = page.locator(".flow .w.from").evaluate_all("all => all.map(e => +e.dataset.t)")
        assert shaded == [a for (a, _), n in zip(words, looks, strict=True) if n >= 0.05]
        assert word(page, first).get_attribute("aria-pressed") == "true"
    first, end = words[12]
    assert state(page)["row"] == (f"{first}" if end - first == 1 else f"{first}-{end - 1}")


def test_several_words_are_averaged_and_said_to_be(opened, tmp_path):
    page = opened(f"{SHORT}&panel=text")
    weights, _ = weights_of(page, tmp_path, 61, 61)
    words = spans(page)
    word(page, words[2][0]).click()
    word(page, words[5][0]).click(modifiers=["Shift"])
    word(page, words[9][0]).click(modifiers=["Control"])
    sentence = told(page, r"\(5 words\) look on average at")
    assert "looked at, in sum, by" in sentence
    chosen = [t for i in (2, 3, 4, 5, 9) for t in range(*words[i])]
    looks, looked = by_words(weights, chosen, words)
    assert [n for _, n in shares(page, "from")] == pytest.approx(falling(looks), abs=0.0051)
    assert [n for _, n in shares(page, "by")] == pytest.approx(falling(looked), abs=0.0051)
    assert "on average" in page.locator(".shares .from h3").inner_text()
    word(page, words[9][0]).click(modifiers=["Control"])
    told(page, r"\(4 words\)")


def test_a_click_in_the_lists_jumps_in_text_and_map(opened):
    page = opened(f"{LONG}&panel=text&row=70000&x=70000&y=70000&scale=8")
    told(page)
    page.locator(".shares .by button").nth(3).click()
    page.wait_for_timeout(300)
    after = state(page)
    assert abs(float(after["x"]) - 70000) < 2  # the chosen word is the key now, the row is the one that was clicked
    assert page.locator(".flow").evaluate("e => e.scrollTop") > 0


def test_generated_words_know_their_step(opened):
    page = opened(f"{SHORT}&panel=text")
    steps = dict(page.locator(".flow .w[data-s]").evaluate_all("all => all.map(e => [+e.dataset.t, e.dataset.s])"))
    assert min(steps) == 40 and steps[40] == "1"
    for (first, end), step in zip([s for s in spans(page) if s[0] >= 40], steps.values(), strict=True):
        assert step == (f"{first - 39}" if end - first == 1 else f"{first - 39}\u2013{end - 40}")
    word(page, 41).click()
    assert "Generated at step 2." in told(page, "Generated")


def test_a_long_text_is_made_only_where_it_is_seen(opened):
    page = opened(f"{LONG}&panel=text")
    page.locator(".flow .w").first.wait_for()
    flow = page.locator(".flow")
    for part in (0.2, 0.5, 0.93):
        flow.evaluate("(e, part) => (e.scrollTop = part * e.scrollHeight)", part)
        page.wait_for_timeout(400)
        seen = flow.evaluate("""e => [...e.querySelectorAll('.w')].filter(w => {
            const a = w.getBoundingClientRect(), b = e.getBoundingClientRect();
            return a.bottom > b.top && a.top < b.bottom; }).length""")
        assert seen > 20
        assert page.locator(".flow .w").count() < 5000
    word(page, spans(page)[-1][0]).click()
    page.keyboard.press("End")
    page.locator(".flow .w[data-e='100000'][aria-pressed=true]").wait_for()
    page.keyboard.press("Home")
    page.locator(".flow .w[data-t='0'][aria-pressed=true]").wait_for()


def test_search_takes_its_signs_literally(opened):
    page = opened(f"{SHORT}&panel=text")
    field = page.get_by_role("searchbox", name="Search the text")
    for query, count in (("{{", 1), (".*", 0), ("<b>", 1), ("the", 5), ("\\", 0)):
        field.fill(query)
        said = "Nothing found" if count == 0 else f"1 of {count} place"
        page.locator(".search [aria-live]").filter(has_text=said).wait_for()
        assert page.locator(".found li").count() == count
    field.fill("the")
    page.locator(".search [aria-live]").filter(has_text="1 of 5").wait_for()
    first = state(page)
    assert first["find"] == "the" and first["row"] == "0"
    field.press("Enter")
    page.locator(".search [aria-live]").filter(has_text="2 of 5").wait_for()
    assert "the" in page.locator(".flow .w.chosen").inner_text().lower()
    page.get_by_role("button", name="Previous place").click()
    page.get_by_role("button", name="Previous place").click()
    page.locator(".search [aria-live]").filter(has_text="5 of 5").wait_for()
    assert page.locator(".found [aria-current=true]").count() == 1


def test_search_moves_a_long_text_and_its_map(opened):
    page = opened(f"{LONG}&panel=text&scale=8")
    page.get_by_role("searchbox").fill("Margaret")
    page.locator(".search [aria-live]").filter(has_text="listed").wait_for()
    page.locator(".found button").nth(150).click()
    page.locator(".flow .w.chosen").filter(has_text="Margaret").wait_for()
    after = state(page)
    assert int(after["row"].split("-")[0]) == pytest.approx(float(after["y"]), abs=3)
    assert int(after["row"].split("-")[0]) > 5000


def numbers(page, table, column):
    at = page.locator(f"table[aria-label={table}] th[data-column]").evaluate_all(
        "(all, column) => all.findIndex(e => e.dataset.column === column)", column
    )
    cells = page.locator(f"table[aria-label={table}] tr[data-row]").evaluate_all(
        "(rows, at) => rows.map(r => r.children[at].textContent)", at
    )
    return [float(cell.strip("≈!")) if re.match(r"≈?[\d.]", cell) else np.nan for cell in cells]


def test_tables_sort_by_each_column(opened):
    page = opened(f"{SHORT}&panel=statistics")
    page.locator("table[aria-label=Heads] tr[data-row]").first.wait_for()
    for column in ("entropy", "largest", "distance", "next"):
        heading = page.locator(f"table[aria-label=Heads] th[data-column={column}]")
        for order in ("descending", "ascending"):
            heading.get_by_role("button").click()
            assert heading.get_attribute("aria-sort") == order
            values = numbers(page, "Heads", column)
            known = [v for v in values if not np.isnan(v)]
            assert len(values) == 10 and known == sorted(known, reverse=order == "descending")
    page.locator("table[aria-label=Heads] tr[data-row] button").first.click()
    assert page.locator("table[aria-label=Heads] tr[aria-current=true]").count() == 1

    page.get_by_role("button", name="Rows", exact=True).click()
    page.locator("table[aria-label=Rows] tr[data-row]").first.wait_for()
    assert page.locator("table[aria-label=Rows]").get_attribute("aria-rowcount") == "62"
    page.locator("table[aria-label=Rows] th[data-column=largest] button").click()
    known = numbers(page, "Rows", "largest")
    assert len(known) > 10 and known == sorted(known, reverse=True)
    page.locator("table[aria-label=Rows] tr[data-row] button").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    row = page.locator("table[aria-label=Rows] tr[aria-current=true]").get_attribute("data-row")
    assert state(page)["row"] == row


def test_rows_of_a_long_text_load_as_they_come_into_view(opened):
    page = opened(f"{LONG}&panel=statistics")
    page.get_by_role("button", name="Rows", exact=True).click()
    page.locator("table[aria-label=Rows] tr[data-row='0']").wait_for()
    page.locator(".rows").last.evaluate("e => (e.scrollTop = 0.5 * e.scrollHeight)")
    page.wait_for_timeout(600)
    rows = page.locator("table[aria-label=Rows] tr[data-row]")
    assert rows.count() < 100
    assert not np.isnan(numbers(page, "Rows", "entropy")).any()


def test_rows_sort_among_all_rows(opened):
    page = opened(f"{LONG}&panel=statistics")
    page.get_by_role("button", name="Rows", exact=True).click()
    page.locator("table[aria-label=Rows] tr[data-row='0']").wait_for()
    page.evaluate(f"""() => {{ const seen = (window.seen = []);
        new MutationObserver((all) => seen.push(...all.map((one) => one.target.textContent))).observe(
            {ROOT}.querySelector("[data-panel=statistics]"), {{ subtree: true, childList: true }}); }}""")
    page.locator("table[aria-label=Rows] th[data-column=distance] button").click()
    page.get_by_text("exact; all 100,000.").first.wait_for()
    assert page.evaluate("() => window.seen.some((text) => text.includes('to sort them: 50,176 of 100,000'))")
    order = page.locator("table[aria-label=Rows] tr[data-row]").evaluate_all("all => all.map(e => +e.dataset.row)")
    assert order[:9] == list(range(99_999, 99_990, -1))


def test_heads_are_filtered_by_role(opened):
    page = opened(f"{LONG}&panel=text")
    show = page.locator(".choice", has_text="Show").locator("select")
    show.select_option(label="previous token (4)")
    page.get_by_role("heading", name="4 of 32 heads").wait_for()
    assert page.locator("[role=status]").inner_text() == "4 of 32 heads"
    assert page.locator(".tiles .name").all_inner_texts() == ["0.3", "1.3", "2.3", "3.3"]
    page.locator(".tiles button").first.focus()
    page.keyboard.press("End")
    assert state(page)["call"] == "3"
    show.select_option(label="with alarms (4)")
    assert page.locator(".tiles .name").all_inner_texts() == ["0.5", "1.5", "2.5", "3.5"]
    show.select_option(label="all heads")
    assert page.locator(".tiles button").count() == 32


def test_line_breaks_break_the_line(opened):
    page = opened(f"{SHORT}&panel=text")
    page.locator(".flow .w").first.wait_for()
    tops = page.locator(".flow .w").evaluate_all(
        "all => all.map(e => [e.textContent, e.getBoundingClientRect().top, e.getBoundingClientRect().left])"
    )
    at = [text for text, *_ in tops].index("⏎")
    line = page.locator(".flow .block").evaluate("e => parseFloat(getComputedStyle(e).lineHeight)")
    assert tops[at][1] == pytest.approx(tops[at - 1][1], abs=3), "the sign stands at the end of its line"
    assert tops[at + 1][1] - tops[at][1] == pytest.approx(2 * line, abs=3), "then comes an empty line"
    assert tops[at + 1][2] < tops[at][2]
    word(page, 12).click()
    assert "\u202e" not in page.locator(".saccade").inner_text()
    assert "⟨202E⟩" in page.locator(".flow").inner_text()


def test_a_figure_has_the_scale_of_the_picture(opened, tmp_path):
    """Of means, too, whose scale ends at what is in view."""
    page = opened(f"{LONG}&pool=mean&tone=linear")
    page.locator(".legend").filter(has_text="≥").wait_for()
    svg = ElementTree.parse(saved(page, "SVG", tmp_path)).getroot()
    ticks = [e.text for e in svg.iter("{http://www.w3.org/2000/svg}text") if e.get("y") == "24"]
    assert len(ticks) == 3 and ticks[2].startswith("≥ 0.")
    assert all(tick in page.locator(".legend").inner_text() for tick in ticks)


def test_files_open_again_and_say_the_same(opened, tmp_path):
    page = opened(f"{SHORT}&panel=text&row=7")
    told(page)
    assert saved(page, "PNG", tmp_path).read_bytes().startswith(b"\x89PNG\r\n")
    svg = ElementTree.parse(saved(page, "SVG", tmp_path)).getroot()
    assert svg[0].text == "both directions: layer 0 head 3, weights"
    cells = [e for e in svg.iter("{http://www.w3.org/2000/svg}rect") if e.get("x") is not None]
    assert len(cells) == 61 * 59  # two keys are hidden
    weights, words = weights_of(page, tmp_path, 61, 61)
    assert np.isnan(weights[:, 59:]).all() and np.nansum(weights, 1) == pytest.approx(np.ones(61), abs=1e-6)
    assert words[0] == "The"

    def cell_reading(page):
        page.locator("canvas.picture").focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowDown"):
            page.keyboard.press(key)
        page.wait_for_timeout(500)
        return page.locator(".reading").inner_text()

    before, sentence = cell_reading(page), told(page)
    assert re.search(r"\d\.\d", before)
    html = saved(page, "HTML", tmp_path)
    again = opened("", html)
    assert told(again) == sentence
    assert cell_reading(again) == before
    word(again, 12).click()
    word(page, 12).click()
    page.wait_for_timeout(400)
    assert told(again) == told(page) != sentence
    assert shares(again, "by") == shares(page, "by")
    again.get_by_role("searchbox", name="Search what is saved").fill("the")
    again.locator(".search [aria-live]").filter(has_text=re.compile("1 of 5 places$")).wait_for()
    again.locator(".tiles button").nth(8).click()  # of a short text all heads are there
    again.wait_for_timeout(400)
    assert again.locator(".complaint:visible").count() == 0


def test_a_saved_part_of_a_long_text_can_be_zoomed_out(opened, tmp_path):
    page = opened(f"{LONG}&panel=text&row=50000&x=50000&y=50000&scale=48")
    told(page)
    again = opened("", saved(page, "HTML", tmp_path))
    assert told(again) == told(page)
    for _ in range(3):
        again.get_by_role("button", name="Zoom out").click()
        again.wait_for_timeout(300)
    assert float(state(again)["scale"]) < 48
    again.get_by_role("searchbox").fill("Margaret")
    again.get_by_text(re.compile(r"1 of \d+ places.* of 100,000 tokens are saved here")).wait_for()
    assert told(again, "not part").startswith("What this word looks at"), "what is found first is far from the view"
    assert again.locator(".complaint:visible").count() == 0


def test_the_keyboard_alone_reaches_a_value(opened):
    page = opened(f"{SHORT}&panel=text")
    page.locator(".flow .w").first.wait_for()
    page.keyboard.press("/")
    for _ in range(6):
        page.keyboard.press("Tab")
        if page.evaluate(
            "() => document.querySelector('#saccade > div').shadowRoot.activeElement?.closest('.flow') !== null"
        ):
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    told(page, r"\W.+\W looks at \W.+\W \.\d\d")  # not the line that asks to choose a word
    said = f"{ROOT}.querySelector('.unseen[role=status]').innerText.trim()"  # a moment later, for each word passed
    page.wait_for_function(f"() => {said} === {ROOT}.querySelector('.told').innerText.trim()")
    page.keyboard.press("Shift+ArrowRight")
    told(page, r"\(2 words\)")

    head = page.locator(".tiles button[aria-pressed=true]")
    head.focus()
    page.keyboard.press("ArrowDown")
    assert (state(page)["call"], state(page)["head"]) != ("0", "3")
    assert page.evaluate(f"() => {ROOT}.activeElement.getAttribute('aria-pressed')") == "true"
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys, gestures and colours").wait_for()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(opened, scheme):
    page = opened(f"{SHORT}&row=7", width=390, height=844, color_scheme=scheme, has_touch=True)
    for panel in page.locator("[role=tab]:visible").evaluate_all("all => all.map(e => e.dataset.tab)"):
        page.locator(f"[role=tab][data-tab={panel}]").click()
        page.wait_for_timeout(300)
        wide = page.evaluate(
            """panel => {
            const root = document.querySelector('#saccade > div').shadowRoot;
            const section = root.querySelector(`[data-panel=${panel}]`);
            return [document.scrollingElement.scrollWidth, section.scrollWidth - section.clientWidth,
                    section.getBoundingClientRect().right]; }""",
            panel,
        )
        assert wide[0] <= 390 and wide[1] <= 0 and wide[2] <= 390, panel
    for name in ("Save", "Help"):
        page.get_by_role("button", name=name, exact=True).click()
        box = page.get_by_role("dialog").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        page.keyboard.press("Escape")


def test_markup_in_a_text_stays_text(opened):
    page = opened(f"{SHORT}&panel=text&row=1")
    told(page)
    assert "</script><script>alert(1)</script>" in page.locator(".flow").inner_text()
    inside = page.evaluate("""() => { const root = document.querySelector('#saccade > div').shadowRoot;
        return root.querySelectorAll('script, b, img, iframe').length; }""")
    assert inside == 0
    assert "\x07" not in page.locator(".flow").inner_text()


def test_cross_attention_shows_both_texts(opened):
    page = opened(f"{CROSS}&panel=text&row=7")
    sentence = told(page)
    assert "cross-attention" in sentence and "looked at" not in sentence
    assert page.locator(".flow .side").all_inner_texts() == ["source (keys)", "target (queries)"]
    page.locator(".flow .block").first.locator(".w").nth(3).click()
    assert "is looked at by" in told(page, "is looked at by")
    assert "key" in state(page)


def test_contrast_of_words_and_numbers(opened):
    """Text has 4.5 : 1 or more on whatever is behind it (WCAG 2)."""
    for scheme in ("light", "dark"):
        page = opened(f"{SHORT}&panel=text&row=7", color_scheme=scheme)
        told(page)
        page.wait_for_timeout(300)
        least = page.evaluate(CONTRAST)
        assert least[0] >= 4.5, least


CONTRAST = """() => {
    const root = document.querySelector('#saccade > div').shadowRoot.querySelector('.saccade');
    const pen = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const rgba = colour => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].map((v, i) => i < 3 ? v : v / 255); };
    const over = (a, b) => a.slice(0, 3).map((v, i) => v * a[3] + b[i] * (1 - a[3]));
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = c => { const [r, g, b] = c.map(v => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ground = e => e === null ? [255, 255, 255]
        : over(rgba(getComputedStyle(e).backgroundColor), ground(e.parentElement));
    let least = [99, ''];
    for (const e of root.querySelectorAll('*')) {
        const told = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
        if (!told || !e.getClientRects().length || e.closest('select, :disabled')) continue;
        const back = ground(e), a = light(over(rgba(getComputedStyle(e).color), back)), b = light(back);
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < least[0]) least = [ratio, e.className + ': ' + e.textContent.slice(0, 40)];
    }
    return least; }"""


def test_keys_of_a_cross_map_have_what_they_receive(opened):
    page = opened(f"{CROSS}&panel=statistics")
    choose = page.get_by_role("group", name="Numbers of")
    choose.get_by_role("button", name="Keys").click()
    table = page.get_by_role("table", name="Keys")
    table.get_by_role("button", name="Received").click()
    numbers = [float(text) for text in table.locator("tbody td:not([colspan])").all_inner_texts()]
    assert len(numbers) > 10 and numbers == sorted(numbers, reverse=True)
    row = table.locator("tbody tr[data-row]").first
    token = row.get_attribute("data-row")
    row.click()
    page.wait_for_function(f"() => location.hash.includes('key={token}')")
    page.locator(".controls select").first.select_option(index=0)
    page.get_by_role("table", name="Rows").wait_for()
    assert choose.get_by_role("button", name="Keys").count() == 0
