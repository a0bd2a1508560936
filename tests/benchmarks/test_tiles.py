"""Tiles that a mask touches, against counting them one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hypothesis import given, strategies as st

from saccade.benchmark.attention import Case

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from targets.tiles import multiplied_pairs, visited, visited_tiles

sys.path.pop()  # its tasks.py would be found in place of the folder tests/tasks

MASKS = ["full", "causal", "window:1", "window:7", "prefix:3", "documents:3", "padding:half", "window:5+documents:3"]


def one_by_one(case, rows, keys):
    """[B][bands]: tiles with a visible pair."""
    seen = case.pattern.dense(case.sizes)
    seen = torch.ones(1, 1, case.length_q, case.length_k, dtype=torch.bool) if seen is None else seen
    seen = seen.expand(case.batch, 1, -1, -1)[:, 0]
    bands, columns = range(0, case.length_q, rows), range(0, case.length_k, keys)
    return [[sum(bool(one[i : i + rows, j : j + keys].any()) for j in columns) for i in bands] for one in seen.unbind()]


@given(
    mask=st.sampled_from(MASKS),
    batch=st.integers(1, 3),
    length=st.integers(1, 29),
    more=st.integers(0, 11),
    rows=st.integers(1, 7),
    keys=st.integers(1, 7),
)
def test_tiles_are_counted_as_one_by_one(mask, batch, length, more, rows, keys):
    case = Case(length, length + more, mask, batch=batch)
    expected = one_by_one(case, rows, keys)
    assert visited(case, rows, keys).tolist() == expected
    heights = [min(rows, length - start) for start in range(0, length, rows)]
    pairs = sum(count * height for item in expected for count, height in zip(item, heights, strict=True))
    assert multiplied_pairs(case, rows, keys) == keys * pairs


def test_time_is_counted_by_tiles_of_48_of_all_heads():
    assert visited_tiles(Case(97, 97, heads=5, kv_heads=5, batch=2)) == 2 * 5 * 3 * 3
    assert visited_tiles(Case(96, 96, "causal", heads=5, kv_heads=5)) == 5 * 3
