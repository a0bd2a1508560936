"""The notebooks run, and print and draw what is stored in them."""

from __future__ import annotations

import re

import nbformat
import pytest
from notebooks import HOUR, NOTEBOOKS, PAGE, PICTURES, as_page, execute, pictures, printed, stored
from pages import same_output

LARGEST, LARGEST_PICTURE = 40_000, 60_000  # bytes, pictures apart; of one picture
MOST_WORDS = 3_500  # 20 minutes of reading


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_is_stored(path, tmp_path):
    before = stored(path)
    nbformat.validate(before)
    shown, came = printed(before), printed(execute(path, tmp_path))
    assert len(shown) == len(came) > 0
    for number, (old, new) in enumerate(zip(shown, came, strict=True)):
        assert same_output(old, new), f"code cell {number} prints other text than is stored:\n{new}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_stay_small_and_plain(path):
    drawn = [len(picture.encode()) for picture in pictures(stored(path))]
    assert max(drawn, default=0) < LARGEST_PICTURE
    assert path.stat().st_size < LARGEST + 1.2 * sum(drawn)  # quotes are escaped
    for cell in stored(path).cells:
        for output in cell.get("outputs", ()):
            assert output.output_type in ("stream", "execute_result", "display_data")
            assert output.get("name", "stdout") == "stdout", "a warning was printed"


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["looking-at-a-model", "operator-and-masks", HOUR.stem]


def test_the_first_hour_is_a_page_too():
    """`python tests/docs/refresh.py docs/notebooks/self-attention-in-an-hour.ipynb` writes it."""
    assert PAGE.read_text(encoding="utf-8") == as_page(stored(HOUR))
    kept = {path.name: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    assert kept == {f"{number}.svg": svg for number, svg in enumerate(pictures(stored(HOUR)))}


def test_the_first_hour_takes_twenty_minutes_to_read():
    cells = stored(HOUR).cells
    assert sum(len(cell.source.split()) for cell in cells) < MOST_WORDS
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    assert len(re.findall(r"^\s*same\(", code, re.MULTILINE)) >= 12  # each step: the textbook's lines, then one line
