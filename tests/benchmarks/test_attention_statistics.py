"""The benchmark of statistics checks what it times, and has a row for each dtype, length and mask."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from saccade.operator._backends.native import _kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention_statistics.py"

pytestmark = pytest.mark.skipif(_kernels.module is None, reason="it times the native kernels")


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("attention_statistics_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


def test_every_case_has_a_row(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "LENGTHS", (61, 127))
    monkeypatch.setattr(benchmark, "memory", lambda case, contender, threads: case.length * 2**20)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--rounds", "2", "--out", str(tmp_path / "out.md")])
    monkeypatch.setattr(benchmark.torch, "set_num_threads", lambda threads: None)
    benchmark.main()
    rows = [line.split(" | ")[:3] for line in (tmp_path / "out.md").read_text().splitlines() if " ms | " in line]
    names = ("float32", "bfloat16")
    assert rows == [[f"| {n}", mask, dtype] for n in (61, 127) for mask in ("none", "causal") for dtype in names]
    assert "| 65536 | 1 | causal |" in (tmp_path / "out.md").read_text()


def test_a_wrong_number_is_not_timed(benchmark, monkeypatch):
    case = benchmark.Case(61, True, "float32")
    benchmark.check(case)
    right = benchmark.saccade.statistics
    monkeypatch.setattr(
        benchmark.saccade, "statistics", lambda query, *more, **given: right(query * 1.01, *more, **given)
    )
    with pytest.raises(AssertionError, match="is .* off"):
        benchmark.check(case)


@pytest.mark.slow
def test_memory_is_that_of_another_process(benchmark):
    assert 0 <= benchmark.memory(benchmark.Case(67, True, "float32"), "statistics", 1) < 50 * 2**20
