"""Checkpoint files: whole or not there, recognised as damaged, pruned; and a disk that is full."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.training.run_folder.checkpoint_files import (
    DamagedCheckpoint,
    _HashingWriter,
    checkpoints,
    prune,
    read_checkpoint,
    write_checkpoint,
)
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
    (tmp_path / ".000000001.checkpoint.x7_abcde").write_text("of a killed process")
    for step in (1, 2, 10**9, 999_999_999, 10, 9):
        write_checkpoint(tmp_path, step, STATE)
    assert [path.stem for path in checkpoints(tmp_path)][:3] == ["1000000000", "999999999", "000000010"]
    prune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"1000000000.checkpoint", "999999999.checkpoint"}


OTHERS = (".notes", "1.checkpoint", "000000001 copy.checkpoint", ".000000001.checkpoint.swp", "epoch1.pt")


def test_what_others_put_there_stays(tmp_path):
    for name in OTHERS:
        (tmp_path / name).write_text("mine")
    for name in (".ipynb_checkpoints", "000000077.checkpoint", ".000000001.checkpoint.abcdefgh"):
        (tmp_path / name).mkdir()
    before = set(tmp_path.iterdir())
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step, STATE)
        prune(tmp_path)
    assert set(tmp_path.iterdir()) == before | {tmp_path / "000000002.checkpoint", tmp_path / "000000003.checkpoint"}
    assert [path.stem for path in checkpoints(tmp_path)] == ["000000003", "000000002"]


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step, STATE)
    unlink = Path.unlink

    def stubborn(self, **options):
        if self.stem == "000000002":
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", stubborn)
    with pytest.raises(PermissionError, match="000000002.checkpoint"):
        prune(tmp_path)
    assert [path.stem for path in checkpoints(tmp_path)] == ["000000004", "000000003", "000000002"]


def test_a_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_the_end(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, Path.replace

    def noted_sync(handle):
        status = os.fstat(handle)
        done.append(("sync", status.st_ino, status.st_size))
        sync(handle)

    def noted_replace(self, target):
        done.append(("rename", self.stat().st_ino, self.stat().st_size))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    path = write_checkpoint(tmp_path, 3, STATE)
    file, folder = path.stat(), tmp_path.stat()
    # The whole file, its digest included, each time.
    assert done[:2] == [("sync", file.st_ino, file.st_size), ("rename", file.st_ino, file.st_size)]
    assert [(what, inode) for what, inode, _ in done[2:]] == [("sync", folder.st_ino)]


class _BrokenOff:
    """A file whose third write raises."""

    def __init__(self, file, error):
        self._file, self._error, self._writes = file, error, 0

    def write(self, data):
        self._writes += 1
        if self._writes == 3:
            raise self._error
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room"), ValueError("closed")])
def test_what_breaks_off_a_write_is_what_is_raised(tmp_path, monkeypatch, error):
    write_checkpoint(tmp_path, 1, STATE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    opened = Path.open

    @contextlib.contextmanager
    def broken(path, mode):
        with opened(path, mode) as file:
            yield _BrokenOff(file, error)

    with monkeypatch.context() as patched, pytest.raises(type(error)) as raised:
        patched.setattr(Path, "open", broken)
        write_checkpoint(tmp_path, 2, STATE)
    assert raised.value is error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_ctrl_c_before_a_write_is_ctrl_c(tmp_path, monkeypatch):
    # Python runs a signal's handler where a function is entered, outside of what that function catches.
    write, writes = _HashingWriter.write, []

    def third(self, data):
        writes.append(data)
        if len(writes) == 3:
            signal.raise_signal(signal.SIGINT)
        return write(self, data)

    monkeypatch.setattr(_HashingWriter, "write", third)
    # A shell that starts a job in the background has it ignore the signal, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path, 2, STATE)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(tmp_path.iterdir())


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
