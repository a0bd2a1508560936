"""The figure of the scale: its numbers against what mathematics says of them, and that it is drawn."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("benchmark_scale", ROOT / "benchmarks" / "scale.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("scaled", [True, False])
def test_the_variance_is_that_of_a_sum_of_products(scale, scaled):
    # q.k has variance d; samples share queries and keys, so the variance of the estimate is near 2 d^2 / (samples * L).
    width, samples = 37, 50
    row = scale.measure(width, scaled, samples)
    expected = 1.0 if scaled else width
    assert abs(row.variance / expected - 1) < 5 * math.sqrt(2 / (samples * scale.LENGTH))


def test_unscaled_rows_become_certain_and_most_gradients_vanish(scale):
    scaled, unscaled = (scale.measure(512, which, 20) for which in (True, False))
    assert unscaled.entropy < 0.3 < 3.5 < scaled.entropy < math.log(scale.LENGTH)
    assert unscaled.certain > 0.5 and scaled.certain == 0
    assert unscaled.query_median < scaled.query_median / 2 and unscaled.query_mean > 5 * scaled.query_mean


@pytest.mark.slow
def test_the_figure_names_both_and_is_the_same_each_time(scale):
    rows = [scale.measure(width, which, 2) for width in (2, 8) for which in (True, False)]
    first = scale.draw(rows)
    assert first == scale.draw(rows)
    assert "<svg" in first and first.count('<g id="axes_') == 3
    assert "| 8 | no |" in scale.table(rows)
