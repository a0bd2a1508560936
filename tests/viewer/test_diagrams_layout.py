"""In a browser: no two texts overlap and none leaves its box, at any width, in both themes, and with another font."""

from __future__ import annotations

import tempfile
from pathlib import Path

import checkpoints
import pytest

import saccade
from saccade.models import load
from saccade.nn import AttentionConfig, BlockConfig, EncoderBlock, MultiHeadAttention
from saccade.viewer.diagrams._architectures import ARCHITECTURES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_poison")]

LONG = "Nevertheless extraordinary circumstances"
MANY = "the cat sat on the mat and it was warm"
ONE = "m" * 22  # wider than its column
PHONE = 390


def step_of_a_pair(text, target):
    """Of a tiny encoder-decoder with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(checkpoints.bart(Path(folder) / "bart"), head="conditional-generation")
        return saccade.diagram("decoder-step", model=model, text=text, target=target)


PICTURES = {
    "attention": lambda: saccade.diagram("attention"),
    "attention of long words": lambda: saccade.diagram("attention", text=LONG),
    "attention of marks": lambda: saccade.diagram("attention", text="<b> & 猫"),
    "attention of one word": lambda: saccade.diagram("attention", text="I"),
    "multi-head": lambda: saccade.diagram("multi-head"),
    "multi-head of long words": lambda: saccade.diagram("multi-head", text=LONG),
    "many heads": lambda: saccade.diagram(MultiHeadAttention(AttentionConfig(96, 32, kv_heads=8))),
    "one head": lambda: saccade.diagram(MultiHeadAttention(AttentionConfig(7, 1))),
    "plain attention": lambda: saccade.diagram("attention", plain=True),
    "plain attention of long words": lambda: saccade.diagram("attention", text=LONG, plain=True),
    "plain attention of many words": lambda: saccade.diagram("attention", text=MANY, plain=True),
    "plain attention of one word": lambda: saccade.diagram("attention", text=ONE, plain=True),
    "plain heads": lambda: saccade.diagram("multi-head", text=LONG, plain=True),
    "plain heads of many words": lambda: saccade.diagram("multi-head", text=MANY, plain=True),
    "plain many heads": lambda: saccade.diagram(MultiHeadAttention(AttentionConfig(96, 32, kv_heads=8)), plain=True),
    "block": lambda: saccade.diagram("block"),
    "blocks": lambda: saccade.diagram("block", model="vaswani"),
    "wide block": lambda: saccade.diagram("block", model="llama"),
    "parallel block": lambda: saccade.diagram(EncoderBlock(BlockConfig(AttentionConfig(64, 8), placement="parallel"))),
    "graph layers": lambda: saccade.diagram("block", model="gat"),
    "transformer": lambda: saccade.diagram("transformer"),
    "encoder-decoder": lambda: saccade.diagram("transformer", model="vaswani"),
    **{name: lambda name=name: saccade.diagram("transformer", model=name) for name in ARCHITECTURES},
    "step": lambda: saccade.diagram("decoder-step"),
    "step of long words": lambda: saccade.diagram("decoder-step", text=LONG),
    "step of two texts": lambda: step_of_a_pair("The cat sat on the mat.", "Nobody knows"),
    "step of two short texts": lambda: step_of_a_pair("<b>", "& x"),
    "variants": lambda: saccade.diagram("variants"),
    "one mask": lambda: saccade.diagram(saccade.Causal() & saccade.Window(left=3, right=0)),
}
WITH_OTHER_FONTS = ("attention", "multi-head", "plain attention of long words", "plain heads")
WITH_OTHER_FONTS += ("blocks", "encoder-decoder", "step", "variants")
# Texts as [text, left, top, right, bottom, fill, box], the box on which each is painted, in the picture's own units.
MEASURE = """() => {
  const svg = document.querySelector('svg'), scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const sides = (e) => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom].map(v => v / scale);
  };
  const painted = [], texts = [];
  for (const e of svg.querySelectorAll('rect, text')) {
    const [left, top, right, bottom] = sides(e), x = (left + right) / 2, y = (top + bottom) / 2;
    if (e.tagName === 'text') {
      const under = painted.filter(b => b[0] <= x && x <= b[2] && b[1] <= y && y <= b[3]);
      texts.push([e.textContent, left, top, right, bottom, getComputedStyle(e).fill, under[under.length - 1]]);
    } else if (e.getAttribute('fill') !== 'none') painted.push([left, top, right, bottom]);
  }
  return {page: document.documentElement.scrollWidth, texts};
}"""


def measured(browser, svg, width, scheme="light"):
    page = browser.new_page(viewport={"width": width, "height": 600}, color_scheme=scheme)
    style = "<style>body{margin:0}svg{display:block;width:100%;height:auto}</style>"
    page.set_content(style + svg)
    found = page.evaluate(MEASURE)
    page.close()
    return found


def overlaps(texts):
    """Pairs of texts whose boxes share an area; a line's box is a little higher than its letters."""
    out = []
    for i, (a, left, top, right, bottom, *_) in enumerate(texts):
        for b, left2, top2, right2, bottom2, *_ in texts[:i]:
            across = min(right, right2) - max(left, left2)
            down = min(bottom, bottom2) - max(top, top2)
            if across > 0.6 and down > 2.5:
                out.append((a, b, round(across, 1), round(down, 1)))
    return out


def left_boxes(texts):
    """Texts that begin or end outside of what they are painted on."""
    out = []
    for text, left, top, right, bottom, _, box in texts:
        middle = (top + bottom) / 2
        inside = left >= box[0] - 0.6 and right <= box[2] + 0.6 and box[1] <= middle - 4 and middle + 4 <= box[3]
        out += [] if inside else [(text, left, right, box)]
    return out


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_overlaps_another_or_leaves_its_box(name, browser):
    svg = PICTURES[name]().svg
    inks = {}
    for width in (400, 900, 2000):
        for scheme in ("light", "dark"):
            found = measured(browser, svg, width, scheme)
            assert found["page"] <= width
            assert len(found["texts"]) >= 3
            assert not overlaps(found["texts"])
            assert not left_boxes(found["texts"])
            inks[scheme] = {text[5] for text in found["texts"]}
    assert not inks["light"] & inks["dark"]


@pytest.mark.parametrize("family", ["DejaVu Sans", "serif"])
@pytest.mark.parametrize("name", WITH_OTHER_FONTS)
def test_widths_hold_with_another_font(name, family, browser):
    svg = PICTURES[name]().svg
    other = svg.replace("Helvetica, Arial, 'Liberation Sans', Arimo, sans-serif", family)
    assert other != svg
    found = measured(browser, other, 900)
    assert not overlaps(found["texts"])
    assert not left_boxes(found["texts"])


@pytest.mark.parametrize("width", [390, 800, 1600])
@pytest.mark.parametrize("name", ["attention", "multi-head", "encoder-decoder"])
def test_the_page_of_a_picture_is_readable_at_any_width(name, width, browser, tmp_path):
    (tmp_path / "a.html").write_text(PICTURES[name]().html, encoding="utf-8")
    for scheme, paper in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(15, 19, 24)")):
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        page.goto((tmp_path / "a.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width  # the picture scrolls, not the page
        smallest = page.evaluate("""() => {
          const svg = document.querySelector('svg');
          const sizes = [...svg.querySelectorAll('text')].map(e => parseFloat(e.getAttribute('font-size')));
          return Math.min(...sizes) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
        }""")
        assert smallest >= 9
        figure = page.locator("figure")
        figure.focus()
        page.keyboard.press("End"), page.keyboard.press("ArrowRight")
        page.wait_for_timeout(300)
        room = figure.evaluate("e => e.scrollWidth - e.clientWidth")
        assert not room or figure.evaluate("e => e.scrollLeft") > 0  # the keyboard reaches what is beside
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", [name for name in PICTURES if name.startswith("plain")])
def test_a_plain_picture_has_whole_words_of_eleven_pixels_on_a_telephone(name, scheme, browser, tmp_path):
    picture = PICTURES[name]()
    picture.save(tmp_path / "a.html")
    page = browser.new_page(viewport={"width": PHONE, "height": 844}, color_scheme=scheme)
    page.goto((tmp_path / "a.html").as_uri())
    found = page.evaluate(MEASURE)
    sizes = page.evaluate("""() => [...document.querySelectorAll('text, tspan')].map(e =>
      parseFloat(getComputedStyle(e).fontSize) * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b))""")
    figure = page.locator("figure").evaluate("e => e.scrollWidth - e.clientWidth")
    page.close()
    assert figure == 0 and found["page"] <= PHONE  # nothing scrolls
    assert min(sizes) >= 11
    assert not overlaps(found["texts"]) and not left_boxes(found["texts"])
    said = [text[0] for text in found["texts"]]
    assert not any(text.endswith("…") for text in said)
    assert {label.replace(" ", "") for label in picture.facts["labels"]} <= {text.replace(" ", "") for text in said}
