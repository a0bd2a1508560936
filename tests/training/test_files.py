"""Checkpoint files: whole or not there, recognised as damaged, pruned; and a disk that is full."""

from __future__ import annotations

import contextlib
import random
import resource

import numpy as np
import pytest
import torch

from saccade.training.files import DamagedCheckpoint, checkpoints, read_checkpoint, write_checkpoint
from saccade.training.state import random_states, set_random_states, step_seed

STATE = {"weights": {"a": torch.arange(7.0), "b": torch.randn(3, 5)}, "step": 3, "best": 0.1, "none": None}


@contextlib.contextmanager
def files_no_larger_than(size):
    """As on a full disk, a write beyond `size` bytes of any file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_written_is_read(tmp_path):
    path = write_checkpoint(tmp_path, 3, STATE)
    assert path.name == "000000003.checkpoint"
    state = read_checkpoint(path)
    assert {name: value for name, value in state.items() if name != "weights"} == {"step": 3, "best": 0.1, "none": None}
    for name, tensor in STATE["weights"].items():
        assert torch.equal(state["weights"][name], tensor)


def test_the_newest_two_are_kept_and_nothing_unfinished(tmp_path):
    (tmp_path / ".000000001.checkpoint.x7").write_text("of a killed process")
    for step in (1, 2, 10, 9):
        write_checkpoint(tmp_path, step, STATE)
    assert [path.stem for path in checkpoints(tmp_path)] == ["000000010", "000000009"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_a_single_wrong_bit_is_noticed(tmp_path, place):
    path = write_checkpoint(tmp_path, 3, STATE)
    content = bytearray(path.read_bytes())
    content[int(place * len(content)) if place >= 0 else -1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        DamagedCheckpoint, match=r"000000003.checkpoint: damaged, its checksum does not fit \([\d,]+ bytes\)"
    ):
        read_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 1000])
def test_what_is_no_checkpoint(tmp_path, content):
    path = tmp_path / "000000003.checkpoint"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        read_checkpoint(path)


def test_reading_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("ran",))

    path = write_checkpoint(tmp_path, 3, {"evil": Evil()})
    with pytest.raises(DamagedCheckpoint, match="not a checkpoint"):
        read_checkpoint(path)


def test_a_full_disk_leaves_what_was_there(tmp_path):
    large = {"weights": torch.randn(40_000)}
    write_checkpoint(tmp_path, 1, STATE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for limit in (0, 20_000, 150_000):
        with files_no_larger_than(limit), pytest.raises(OSError, match="File too large") as raised:
            write_checkpoint(tmp_path, 2, large)
        assert raised.value.filename == str(tmp_path / "000000002.checkpoint")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write_checkpoint(tmp_path, 2, large)
    assert torch.equal(read_checkpoint(tmp_path / "000000002.checkpoint")["weights"], large["weights"])


def test_random_states_come_back(tmp_path):
    path = write_checkpoint(tmp_path, 0, random_states())

    def draw():
        return torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.random(), random.gauss(0, 1)

    expected = draw()
    draw()
    set_random_states(read_checkpoint(path))
    assert draw() == expected


def test_seeds_inside_a_step_differ_in_each_argument():
    arguments = [
        (seed, step, micro, process) for seed in (0, 1) for step in (0, 1, 2) for micro in (0, 1) for process in (0, 1)
    ]
    seeds = [step_seed(*each) for each in arguments]
    assert len(set(seeds)) == len(arguments)
    assert seeds == [step_seed(*each) for each in arguments]
    assert all(0 <= seed < 2**64 for seed in seeds)
    torch.manual_seed(max(seeds))
