"""The measured example runs, checks what it measures, and writes its page."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "unequal_lengths.py"
spec = importlib.util.spec_from_file_location("unequal_lengths", PATH)
unequal_lengths = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = unequal_lengths  # dataclasses look their module up
spec.loader.exec_module(unequal_lengths)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(unequal_lengths, "WIDTH", 12)
    monkeypatch.setattr(unequal_lengths, "HEADS", 2)
    monkeypatch.setattr(unequal_lengths, "BATCH", 3)
    monkeypatch.setattr(unequal_lengths, "lengths", lambda items: [2, 11, 5, 7, 3, 5, 13][:items])


def test_it_writes_a_row_for_each_way(small, tmp_path, capsys):
    page = tmp_path / "page.md"
    unequal_lengths.main(["--items", "7", "--rounds", "2", "--out", str(page)])
    text = page.read_text()
    assert text in capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    names = ["one by one", "padded, random order", "padded, grouped by length", "packed", "nested"]
    assert [row[0].removeprefix("| ") for row in rows] == names
    assert rows[1][3] == "1.00"
    assert "7 sequences, 46 tokens" in text


def test_the_documentation_shows_the_last_run():
    shown, written = (path.read_text(encoding="utf-8") for path in (unequal_lengths.PAGE, unequal_lengths.OUT))
    assert unequal_lengths.table_in(shown) == unequal_lengths.table_in(written)
    assert len(unequal_lengths.table_in(shown).splitlines()) == 7


def test_a_way_that_computes_something_else_is_not_timed(small):
    model = torch.nn.Linear(12, 12)
    data = [torch.randn(3, 12), torch.randn(5, 12)]
    right = unequal_lengths.Way("right", lambda model, sequences: [model(s) for s in sequences], [[0], [1]])
    unequal_lengths.check(model, [right, right], data, data)
    with pytest.raises(AssertionError, match="wrong computes something else"):
        other = unequal_lengths.Way("wrong", lambda m, s: [m(one) * 1.01 for one in s], [[0, 1]])
        unequal_lengths.check(model, [right, other], data, data)


def test_memory_counts_what_lives_at_once(small):
    def hungry(model, sequences):
        held = [torch.ones(1_000_000) * 2 for _ in range(3)]
        return [model(s) + 0 * held[-1].sum() for s in sequences]

    model, data = torch.nn.Linear(12, 12), [torch.randn(3, 12)]
    way = unequal_lengths.Way("hungry", hungry, [[0]])
    # Three arrays of 4 MB, and one more while the last is made.
    assert 16e6 <= unequal_lengths.peak(model, way, data, data) < 17e6
