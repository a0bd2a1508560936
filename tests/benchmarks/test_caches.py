"""The benchmark of caches checks what it times, and has a row for each kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "caches.py"


@pytest.fixture
def caches():
    spec = importlib.util.spec_from_file_location("caches_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = "--length 67 --batch 3 --heads 2 --width 8 --window 13 --rounds 2".split()


def test_every_kind_has_a_row(caches, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["caches.py", *SMALL, "--out", str(tmp_path / "caches.md")])
    caches.main()
    written = (tmp_path / "caches.md").read_text()
    assert capsys.readouterr().out.strip() == written.strip()
    rows = [line.split(" | ")[0].lstrip("| ") for line in written.splitlines() if " ms | " in line]
    assert rows == ["growing", "static", "growing, lengths differ", "window 13", "window 13, 4 sinks"]


def test_a_wrong_answer_is_not_timed(caches, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["caches.py", *SMALL, "--out", str(tmp_path / "caches.md")])
    monkeypatch.setattr(caches.WindowLayer, "mask", property(lambda self: None))
    with pytest.raises(AssertionError):
        caches.main()
    assert not (tmp_path / "caches.md").exists()
