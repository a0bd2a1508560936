"""The benchmark of caches in 8 bits checks what it times, and has a row for each dtype and length."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cache_dtypes.py"
SMALL = "--lengths 67 131 --heads 2 6 --kv-heads 2 --width 8 --rounds 2".split()


@pytest.fixture
def dtypes():
    spec = importlib.util.spec_from_file_location("cache_dtypes_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dtype_has_a_row(dtypes, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["cache_dtypes.py", *SMALL, "--out", str(tmp_path / "page.md")])
    dtypes.main()
    written = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out.strip() == written.strip()
    rows = [line.strip("| ").split(" | ")[:3] for line in written.splitlines() if " ms | " in line]
    names = ["float32", "bfloat16", "8 bits, queries float32", "8 bits, queries bfloat16"]
    assert rows == [[length, heads, name] for length in ("67", "131") for heads in ("2", "6") for name in names]


def test_a_wrong_answer_is_not_timed(dtypes, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["cache_dtypes.py", *SMALL, "--out", str(tmp_path / "page.md")])
    monkeypatch.setattr(dtypes, "step", lambda kind, query, token: query)
    with pytest.raises(AssertionError):
        dtypes.main()
    assert not (tmp_path / "page.md").exists()
