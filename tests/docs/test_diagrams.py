"""The pictures of the documentation are what the command makes, small, and shown with words for who cannot see them."""

from __future__ import annotations

import re

import drawings
import pytest
from diagrams import DIAGRAMS, draw, path_of
from notebooks import without_pixels
from pages import PAGES

LARGEST = 60_000  # bytes


@pytest.mark.usefixtures("no_poison")
@pytest.mark.parametrize("name", DIAGRAMS)
def test_pictures_are_what_the_command_makes(name, tmp_path, capsys):
    draw(name, tmp_path / "made.svg")
    made, kept = (tmp_path / "made.svg").read_bytes(), path_of(name).read_bytes()
    assert made == kept, f"python tests/docs/refresh.py {path_of(name)}"
    assert len(kept) < LARGEST


def rounded(svg):
    """An SVG without pixels, its coordinates to a thousandth of a point: the last digits depend on the machine."""
    return re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3f}", without_pixels(svg))


@pytest.mark.slow
@pytest.mark.usefixtures("no_poison")
def test_drawings_are_what_the_page_draws(tmp_path):
    for name, made in drawings.draw_all(tmp_path).items():
        kept = drawings.path_of(name).read_text(encoding="utf-8")
        assert rounded(made) == rounded(kept), "python tests/docs/refresh.py docs/drawing.md"
        assert len(kept) < LARGEST


def test_every_picture_is_on_a_page_with_words_of_its_own():
    shown = {}
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            shown.setdefault((page.parent / target).resolve(), []).append(words)
    for path in [*map(path_of, DIAGRAMS), *map(drawings.path_of, drawings.DRAWINGS)]:
        assert path in shown, f"{path.name} is on no page"
        assert all(len(words) > 20 for words in shown[path])
