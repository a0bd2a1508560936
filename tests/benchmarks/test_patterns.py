"""The benchmark of sparse patterns: its tiles are those that the masks show, and its line is the one it says it is."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from saccade import PerHead, Window
from saccade.variants.patterns import sparse_fixed

pytest.importorskip("saccade._native")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def patterns():
    spec = importlib.util.spec_from_file_location("benchmark_patterns", ROOT / "benchmarks" / "patterns.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def tiles_of(mask, head, length, grain=48):
    """(full, partial) by looking at every pair."""
    bits = mask.dense(length, length)
    bits = bits[0, head % bits.shape[1]]
    blocks = [block for rows in bits.split(grain) for block in rows.split(grain, 1)]
    return sum(bool(block.all()) for block in blocks), sum(bool(block.any() and not block.all()) for block in blocks)


@pytest.mark.parametrize("mask", [Window(150, 70), PerHead([Window(40, 0), Window(None, None)] * 2)], ids=repr)
def test_every_visited_tile_is_counted_once_for_each_head(patterns, monkeypatch, mask):
    monkeypatch.setitem(patterns.PATTERNS, "here", lambda: mask)
    case = patterns.Case.of("here", 491)
    counts = [tiles_of(mask, head, 491) for head in range(patterns.HEADS)]
    assert (case.full, case.partial) == tuple(map(sum, zip(*counts, strict=True)))


def test_no_pattern_visits_a_tile_that_is_empty_by_much(patterns):
    """A list may call an empty tile partial where it is not worth finding out; not often."""
    case = patterns.Case("fixed", 491, 0, 0, 0.0, sparse_fixed(128, 8))
    full, partial = patterns.visited(patterns.native_mask(case.mask, 491, 491), 491)
    counts = [patterns.HEADS * count for count in tiles_of(case.mask, 0, 491)]
    assert full <= counts[0] and counts[0] + counts[1] <= full + partial <= 1.05 * sum(counts)


def test_the_line_and_what_is_off_it(patterns):
    made = []
    for pattern, tiles, seconds in (("sliding_window(256)", 10, 0.2), ("streaming(1024)", 40, 0.4)):
        case = patterns.Case(pattern, 4096, tiles - 3, 3, 0.001, Window(1, 0))
        for stage in patterns.STAGES:
            case.readings[stage] = [seconds * 5, seconds, seconds / 5]
        made.append(case)
    c = patterns.slope(made, "forward")
    assert math.isclose(c, math.sqrt(0.02 * 0.01))
    assert math.isclose(patterns.off(made[0], "forward", c), math.sqrt(2) - 1)
    assert math.isclose(patterns.off(made[1], "forward", c), 1 / math.sqrt(2) - 1)
    text = patterns.page(made, 3, 1)
    assert "forward: 0 of 2 cases within 20% of one line" in text
    assert "| `sliding_window(256)` | 4096 | 7 | 3 | 1.00 | 200.0 | +41% | 200.0 | +41% |" in text


@pytest.mark.slow
def test_a_small_run(patterns, monkeypatch):
    for name in ("every key", "sparse_strided_heads(128), two each"):
        case = patterns.Case.of(name, 97)
        patterns.measure([case], 2, iter(range(1000)).__next__)
        assert all(case.readings[stage] == [1, 1] for stage in patterns.STAGES)
