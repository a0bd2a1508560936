"""`benchmarks/pruning.py`: what it expects is what is counted, and it runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import saccade

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pruning.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pruning_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_bytes_fall_as_the_formulas_say(script):
    sizes = script.Sizes(length=257, width=64, heads=4, layers=2)
    whole, pruned = (script.counted_bytes(variant, sizes) for variant in script.VARIANTS)
    expected = script.expected_bytes(sizes)
    for name in ("weights", "cache"):
        assert whole[name] - pruned[name] == expected[name]
    saved = "saved for the backward pass"
    assert whole[saved] - pruned[saved] == pytest.approx(expected[saved], rel=0.05)  # and a logarithm for each row


def test_flops_of_an_attention_layer_are_the_docstrings(script):
    sizes = script.Sizes(length=31, width=48, heads=6)
    [layer] = script.attention_layers(script.model_of("attention", "whole", sizes))
    inner, L = 48, 31
    assert saccade.pruning.attention_flops([layer], L, causal=True) == 8 * 48 * inner * L + 4 * inner * L * (L + 1) // 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_it_runs(script, tmp_path, capsys):
    out = tmp_path / "page.md"
    script.main(
        ["--rounds", "1", "--length", "64", "--width", "32", "--heads", "4", "--layers", "1", "--out", str(out)]
    )
    assert out.read_text() == capsys.readouterr().out
    assert out.read_text().count("\n| decoder") == 3
