"""The notebooks run, and print what is stored in them."""

from __future__ import annotations

import nbformat
import pytest
from notebooks import NOTEBOOKS, execute, printed, stored
from pages import same_output

LARGEST = 40_000  # bytes


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
    assert path.stat().st_size < LARGEST
    for cell in stored(path).cells:
        for output in cell.get("outputs", ()):
            assert output.output_type in ("stream", "execute_result", "display_data")
            assert output.get("name", "stdout") == "stdout", "a warning was printed"


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["looking-at-a-model", "operator-and-masks"]
