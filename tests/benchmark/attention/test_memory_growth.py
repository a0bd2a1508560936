"""Peaks are seen, inputs are not counted, and what was free before is."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from saccade.benchmark.attention import memory
from saccade.benchmark.attention.memory import growth

MIB = 2**20

pytestmark = pytest.mark.skipif(not memory.STATUS.exists(), reason="the system does not tell its memory")


def peak_of(size):
    """Touches `size` bytes and gives all but a little of them back."""

    def call():
        np.ones(size, dtype=np.uint8)
        return np.ones(MIB, dtype=np.uint8)

    return call


@pytest.mark.parametrize("size", [16 * MIB, 64 * MIB])
def test_a_peak_that_has_passed_is_seen(size):
    found, method = growth(peak_of(size))
    assert method == "peak"
    assert size * 0.95 < found < size + 8 * MIB


@pytest.mark.slow
def test_an_earlier_peak_is_not():
    peak_of(128 * MIB)()
    found, _ = growth(peak_of(16 * MIB))
    assert found < 32 * MIB


def test_where_the_peak_cannot_be_reset_memory_is_sampled(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "RESET", tmp_path)  # a folder: writing to it is an OSError
    found, method = growth(lambda: np.ones(64 * MIB, dtype=np.uint8))
    assert method == "sampled"
    assert 60 * MIB < found < 72 * MIB


@pytest.mark.parametrize("method", ["peak", "sampled"])
def test_garbage_collected_during_the_call_hides_nothing(monkeypatch, tmp_path, method):
    if method == "sampled":
        monkeypatch.setattr(memory, "RESET", tmp_path)
    garbage = [np.ones(64 * MIB, dtype=np.uint8)]
    garbage.append(garbage)
    del garbage

    def call():
        gc.collect()
        return np.ones(32 * MIB, dtype=np.uint8)

    found, seen = growth(call)
    assert seen == method
    assert 30 * MIB < found < 40 * MIB


def test_a_call_that_raises_ends_the_sampling(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "RESET", tmp_path)
    with pytest.raises(ZeroDivisionError):
        growth(lambda: 1 // 0)


def test_a_system_that_does_not_tell_is_an_error(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tsomething\n")
    monkeypatch.setattr(memory, "STATUS", status)
    with pytest.raises(OSError, match="has no VmRSS"):
        growth(lambda: None)
