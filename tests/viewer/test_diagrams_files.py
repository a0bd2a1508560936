"""Themes, formats, texts of any kind, and what is wrong with an input, told in one sentence."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from drawn import SVG, root, texts
from torch import nn

import saccade
from saccade.cli import main
from saccade.nn import AttentionConfig, MultiHeadAttention
from saccade.support._numbers import typeset
from saccade.variants import LinearConfig
from saccade.viewer.diagrams import KINDS
from saccade.viewer.diagrams._canvas import runs_of
from saccade.viewer.diagrams._fonts import fitted, width_of
from saccade.viewer.diagrams._shapes import HEAT
from saccade.viewer.diagrams._theme import DARK, HEADS, LIGHT

pytestmark = pytest.mark.usefixtures("no_poison")


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def mixed(over, ground, share):
    parts = [(int(over[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(colours):
    roles = ["query", "key", "value", "weight", *(f"head{n}" for n in range(HEADS))]
    grounds = ["paper", "wash", *(f"{role}-wash" for role in roles)]
    for ground in grounds:
        assert contrast(colours["ink"], colours[ground]) >= 4.5, ground
        assert contrast(colours["soft"], colours[ground]) >= 4.5, ground
    for role in roles:
        assert contrast(colours[role], colours["paper"]) >= 4.5, role
        assert contrast(colours[role], colours[f"{role}-wash"]) >= 3, role
    assert contrast(colours["ink"], mixed(colours["heat"], colours["paper"], HEAT)) >= 4.5
    assert contrast(colours["pair"], colours["wash"]) >= 3
    assert contrast(colours["line"], colours["paper"]) >= 3


def test_themes():
    auto, light, dark = (saccade.diagram("block", theme=theme).svg for theme in ("auto", "light", "dark"))
    assert "prefers-color-scheme" in auto and "<style" not in light + dark and "class=" not in light + dark
    assert f'fill="{LIGHT["paper"]}"' in auto and f'fill="{DARK["paper"]}"' in dark and LIGHT["ink"] not in dark
    used = {name for found in re.findall(r'class="([^"]+)"', auto) for name in found.split()}
    assert used == set(re.findall(r"\.(saccade-[\w-]+)\{", auto))
    plain = re.sub(r"<style>.*?</style>\n| class=\"[^\"]*\"", "", auto)
    assert plain == light  # so that what knows no style sheets shows the light one


def test_equal_pictures_are_equal_files_and_carry_nothing_from_a_network():
    first, second = (saccade.diagram("attention").svg for _ in range(2))
    assert first == second
    assert re.findall(r"https?://[^\"]+", first) == ["http://www.w3.org/2000/svg"]


@pytest.mark.parametrize("text", ['<b> & "q"', "a \x07 b \x00", "tab\tline\nline", "猫 {x}^{2}"])
def test_any_text_stays_text(text):
    text = text.replace("\x00", "\x01")
    picture = saccade.diagram("attention", text=text)
    elements = {part.tag.removeprefix(SVG) for part in root(picture).iter()}
    assert elements <= {"svg", "title", "desc", "style", "g", "rect", "path", "circle", "text", "tspan"}
    said = texts(root(picture))
    assert all(label in said for label in picture.facts["labels"])
    assert "<b>" not in picture.svg and "\x07" not in picture.svg
    html = picture.html
    assert "<b>" not in html and html.count("<svg") == html.count("</svg>") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_well_formed_in_every_format(kind, tmp_path):
    picture = saccade.diagram(kind)
    assert picture.kind == kind and kind in repr(picture)
    assert picture._repr_html_() == picture.svg
    assert ElementTree.fromstring(picture.svg).find(f"{SVG}desc").text
    assert len(picture.title) < 90
    for ending in ("svg", "html"):
        path = picture.save(tmp_path / f"a.{ending}")
        picture.save(path)  # ours, so it may be replaced
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_png_has_the_size_and_the_colours_of_the_picture(tmp_path):
    pytest.importorskip("resvg_py")
    image = pytest.importorskip("PIL.Image")
    picture = saccade.diagram("transformer", theme="dark")
    for _ in range(2):
        picture.save(tmp_path / "a.png")
    with image.open(tmp_path / "a.png") as shown:
        width, height = picture.canvas.size
        assert shown.size == (2 * width, 2 * height)
        assert shown.convert("RGB").getpixel((3, 3)) == (0x0F, 0x13, 0x18)
        colours = {colour for _, colour in shown.convert("RGB").getcolors(1 << 20)}
    assert (0xE9, 0xED, 0xF2) in colours  # the ink of letters


def test_widths_of_letters():
    assert width_of("Hello", 10) == pytest.approx(7.22 + 5.56 + 2.22 + 2.22 + 5.56)
    assert width_of("é", 10) == width_of("e", 10) and width_of("猫", 10) == 10
    assert fitted("abcdefgh", 10, 30) == "abc…" and fitted("ab", 10, 30) == "ab"
    assert [tuple(run) for run in runs_of("QK^{T} W_{O}x")] == [("QK", 0), ("T", 1), (" W", 0), ("O", -1), ("x", 0)]
    assert [typeset(x) for x in (0.005, -0.004, -0.5, 12.34, 123.4)] == ["0.01", "0.00", "−0.50", "12.3", "123"]


# --- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (dict(kind="poster"), ValueError, "kind: expected one of attention, multi-head"),
        (dict(kind="attention", theme="pink"), ValueError, "theme: expected one of 'auto'"),
        (dict(kind="attention", head="9.9"), ValueError, "head: 9.9 does not exist"),
        (dict(kind="attention", head="nine"), ValueError, "head: expected (layer, head) or 'layer.head'"),
        (dict(kind="block", text="a"), ValueError, "text: not for block, which reads no text"),
        (dict(kind="variants", head="1.1"), ValueError, "head: not for variants"),
        (
            dict(kind="block", plain=True),
            ValueError,
            "plain: not for block; attention and multi-head have a plain form",
        ),
        (dict(kind="attention", text=" "), ValueError, "text: expected at least one word"),
        (dict(kind="decoder-step", model="bert"), ValueError, "bert' is an architecture without weights"),
        (dict(source=nn.Linear(3, 4)), ValueError, "source: Linear has no attention to draw"),
        (dict(source=nn.Linear(3, 4), kind="block"), ValueError, "source: Linear has no block"),
        (dict(source=nn.Linear(3, 4), kind="attention"), TypeError, "takes a model that reads text"),
        (dict(source=torch.ones(3)), TypeError, "source: expected a module, a model or its name, got Tensor"),
        (dict(source=nn.Linear(3, 4), model="bert"), ValueError, "model: source already names a model"),
        (dict(kind="transformer", model="bertt"), FileNotFoundError, "bertt: no such model folder"),
    ],
)
def test_wrong_input_is_one_sentence(given, error, told):
    with pytest.raises(error, match=re.escape(told)) as raised:
        saccade.diagram(**given)
    assert "\n" not in str(raised.value)


def test_a_text_that_is_too_long_says_what_fits():
    with pytest.raises(
        ValueError, match="it has 18 words and marks, and for this model a picture holds 11 tokens: the first"
    ):
        saccade.diagram("attention", text="the cat sat on the mat " * 3)


def test_a_mechanism_without_weights_has_no_picture_of_them():
    module = MultiHeadAttention(AttentionConfig(12, 3, mechanism=LinearConfig()))
    with pytest.raises(ValueError, match="expected softmax attention, got 'linear' without weights"):
        saccade.diagram(module)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["poster"], "poster: no kind of diagram; expected one of attention"),
        (["block", "--out", "block.pdf"], "--out block.pdf: expected a name that ends in .svg, .png or .html"),
        (["block", "--out", "nowhere/block.svg"], "does not exist"),
        (["block", "--out", "theirs.svg"], "theirs.svg exists and was not made by Saccade"),
        (["block", "--dark", "--light"], "--dark and --light are both given; give one of them"),
        (["variants", "--model", "bert"], "--model: not available for variants"),
        (["attention", "--head", "a.b"], "head: expected (layer, head) or 'layer.head'"),
        (["block", "--model", "nobody"], "nobody: no such model folder"),
        (["attention", "--target", "a"], "target: not for attention; decoder-step of an encoder-decoder reads one"),
        (["decoder-step", "--target", "a b"], "target: embedded has no target; only an encoder-decoder has one"),
        (["attention", "--head", "1.9"], "head: 1.9 does not exist; this model has the layers 0 to 3"),
        (["attention", "--text", " "], "text: expected at least one word"),
        (["variants", "--plain"], "--plain: not available for variants; only attention and multi-head"),
        (["block", "--text", "a"], "text: not for block"),
        (["block", "--out", "folder.svg"], "cannot write folder.svg: it is a folder"),
        (["block", "--out", "theirs.svg/block.svg"], "theirs.svg"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.svg").write_text("<svg/>")
    (tmp_path / "folder.svg").mkdir()
    assert main(["diagram", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("saccade: error: ") and err.count("\n") == 1 and told in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.svg", "theirs.svg"]


def test_the_command_writes_what_python_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["diagram", "attention", "--text", "It was cold", "--head", "0.3", "--dark"]) == 0
    expected = saccade.diagram("attention", text="It was cold", head="0.3", theme="dark")
    assert (tmp_path / "saccade-attention.svg").read_text() == expected.svg
    assert capsys.readouterr().out == f"{expected.title}\nDiagram: saccade-attention.svg\n"


def test_png_without_its_library_is_one_sentence(tmp_path, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "resvg_py" else found(name, *more)
    )
    with pytest.raises(ValueError, match=r'needs resvg-py.*pip install "matplotlib>=3.9"'):
        saccade.diagram("block").png()
    assert main(["diagram", "block", "--out", str(tmp_path / "a.png")]) == 2
    assert 'pip install "matplotlib>=3.9"' in capsys.readouterr().err
