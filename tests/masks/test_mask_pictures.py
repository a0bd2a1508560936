"""Pictures: exact where pairs are shown, honest where cells stand for many."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from html import escape

import pytest
import torch

from looped import looped
from saccade.operator._masks import Causal, Edges, FromTensor, Global, Padding, PerHead, Predicate, RandomBlocks, Window


def test_text_of_every_pair():
    lines = Causal().picture(3, 5, to="text").splitlines()
    assert lines[0] == "Causal()"
    assert lines[1].split() == ["0", "4"]
    assert lines[2:5] == ["0 ██████····", "1 ████████··", "2 ██████████"]
    assert lines[5] == "3 queries down, 5 keys across; █ attends, · masked"


def test_cells_are_fractions():
    bits = torch.rand(61, 53, generator=torch.Generator().manual_seed(0)) < 0.3
    cells = FromTensor(bits).picture(61, 53, cells=8).cells
    padded = torch.zeros(64, 56)
    padded[:61, :53] = bits.float()
    assert cells.shape == (8, 7)
    for n in range(8):
        for m in range(7):
            part = bits[8 * n : 8 * n + 8, 8 * m : 8 * m + 8]
            assert cells[n, m] == pytest.approx(part.float().mean().item(), abs=1e-6)


def test_blank_means_empty_and_solid_means_full():
    mask = Causal() & (Window(4000, 0) | Global([5, 30001]) | RandomBlocks(1, 2048, 2))
    cells = mask.picture(65536, 65536, cells=32).cells
    step = 65536 // cells.shape[0]
    for n in range(cells.shape[0]):
        for m in range(cells.shape[1]):
            kind = mask.kind((n * step, (n + 1) * step), (m * step, (m + 1) * step), 65536, 65536)
            assert (cells[n, m] == 0) == (kind == "empty") and (cells[n, m] == 1) == (kind == "full")


def test_one_item_and_head():
    mask = PerHead([Causal() & Padding([2, 3]), Window(0, 0)])
    for item in range(2):
        for head in range(2):
            picture = mask.picture(3, 3, item=item, head=head)
            assert torch.equal(torch.from_numpy(picture.cells).bool(), mask.dense(3, 3)[item, head])
            assert f"item {item} of 2, head {head} of 2" in picture.text()
    with pytest.raises(ValueError, match="item must be below 2, got 2"):
        mask.picture(3, 3, item=2)
    with pytest.raises(ValueError, match="head must be below 2, got 5"):
        mask.picture(3, 3, head=5)


def test_svg_stands_alone():
    picture = (Causal() & Padding([3, 13])).picture(11, 13, item=1)
    root = ElementTree.fromstring(picture.svg())
    squares = [element for element in root.iter() if element.tag.endswith("rect")]
    assert len(squares) == int(picture.cells.sum()) + 1
    assert str(picture) == repr(picture) == picture.text()
    assert "&amp;" in picture.svg() and "http" not in picture.svg().replace("http://www.w3.org/2000/svg", "")


def test_a_notebook_shows_the_drawing_without_styles_that_reach_its_page():
    picture = Causal().picture(11, 13)
    shown = picture._repr_html_()
    assert "<style" in picture.svg() and "<style" not in shown
    elements, alone = (len(list(ElementTree.fromstring(svg).iter())) for svg in (shown, picture.svg()))
    assert elements == alone - 1


@pytest.mark.slow
@looped(
    ("mask", "sizes"),
    [
        (Causal(), (32, 32)),
        (Causal() & Window(5, 0), (32, 32)),
        (Causal() & Window(256, 0), (512, 512)),  # the first length at which the window can be seen
        (Causal() & Window(5000, 0), (2**13, 2**13)),
        (Window(2**20, 0), (2**21, 2**21)),
        (Padding([5000, 3000]), (2**13, 2**13)),  # fits no shorter one
        (Padding([3, 5]), (32, 32)),
        (FromTensor(torch.ones(2, 1, 7, 19, dtype=torch.bool)), (7, 19)),
        (Causal() & FromTensor(torch.ones(41, 41, dtype=torch.bool)), (41, 41)),
        (Causal().slice((3, 9), (0, 23), lengths=(29, 29)), (6, 23)),
        (Global([5000]), (2**13, 2**13)),  # nothing is seen at a shorter length
        (Edges([5000], [4000]), (2**13, 2**13)),
    ],
)
def test_a_mask_draws_itself_in_a_notebook(mask, sizes):
    root = ElementTree.fromstring(mask._repr_html_())
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] in repr(mask) or texts[0].endswith("…")
    assert texts[1].startswith(f"{sizes[0]} queries down, {sizes[1]} keys across")


def test_what_a_notebook_shows_of_a_mask_is_small():
    spotted = FromTensor(torch.arange(2000 * 2000).view(2000, 2000) % 3 == 0)
    assert len(spotted._repr_html_()) < 300_000


def test_a_mask_that_cannot_be_drawn_is_its_text():
    def broken(b, h, q, k):
        raise KeyError("mine")

    assert Predicate(broken)._repr_html_() == f"<code>{escape(repr(Predicate(broken)))}</code>"
    assert Predicate(lambda b, h, q, k: q > k)._repr_html_().count("&lt;lambda&gt;") == 2


def test_files(tmp_path):
    for ending in ("txt", "svg"):
        path = Causal().picture(5, 7, to=tmp_path / f"mask.{ending}")
        expected = Causal().picture(5, 7, to="svg" if ending == "svg" else "text")
        assert path.read_text(encoding="utf-8").strip() == expected
        with pytest.raises(FileExistsError, match="overwrite=True"):
            Window(1, 1).picture(5, 7, to=path)
        assert Window(1, 1).picture(5, 7, to=str(path), overwrite=True) == path
        assert "Window" in path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"'text', 'svg' or a path ending in .txt, .svg, .png or .pdf"):
        Causal().picture(5, 7, to="mask.jpeg")
    with pytest.raises(TypeError, match="got 3"):
        Causal().picture(5, 7, to=3)


def test_images(tmp_path):
    pytest.importorskip("matplotlib")
    path = Causal().picture(512, 700, to=tmp_path / "mask.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_images_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "matplotlib>=3.9"'):
        Causal().picture(5, 7, to=tmp_path / "mask.png")
    assert not (tmp_path / "mask.png").exists()


@looped("lengths", [(0, 0), (0, 5), (5, 0), (1, 1), (1, 100000), (100000, 1)])
def test_odd_sizes(lengths):
    picture = Causal().picture(*lengths)
    assert picture.text() and ElementTree.fromstring(picture.svg()) is not None
