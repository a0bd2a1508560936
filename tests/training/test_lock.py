"""Two runs in one folder: the second is told, the first loses nothing, and a run that was killed is in nobody's way."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from saccade.training import Reporter, train_language_model
from saccade.training.run_folder import lock as locking
from saccade.training.run_folder.layout import make_folder
from saccade.training.run_folder.lock import FileLock
from slowly import slow_after
from training.test_run import files_of

# The module alone, which needs only the standard library: a process that starts at once.
HOLDER = f"""
import os, runpy, signal, sys, time
held = runpy.run_path({locking.__file__!r})["FileLock"](sys.argv[1])
if "fork" not in sys.argv or os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def refused(path):
    with pytest.raises(BlockingIOError, match="locked by another process"):
        FileLock(path)
    return True


@pytest.mark.parametrize("worker", [(), ("fork",)])
def test_a_lock_lives_as_long_as_its_process_and_no_longer(tmp_path, worker):
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLDER, path, *worker], stdout=subprocess.PIPE, text=True) as process:
        alive = int(process.stdout.readline())  # a forked worker, which outlives the kill, or the process itself
        assert refused(path)
        process.kill()
        process.wait()
        try:
            assert path.exists()  # which means nothing
            FileLock(path).close()
        finally:
            if alive != process.pid:
                os.kill(alive, signal.SIGKILL)
    assert not path.exists()


def test_a_lock_whose_file_is_removed_while_it_is_taken(tmp_path, monkeypatch):
    path, take, taken = tmp_path / "lock", locking._take, []

    def late(handle):
        if not taken:
            taken.append(path.unlink())  # by the one who had it
        take(handle)

    monkeypatch.setattr(locking, "_take", late)
    lock = FileLock(path)
    assert taken and refused(path)
    lock.close()


def test_a_lock_within_one_process(tmp_path):
    first = FileLock(tmp_path / "lock")
    assert refused(tmp_path / "lock")
    first.close()
    first.close()
    FileLock(tmp_path / "lock").close()


def test_a_system_without_locks_is_told(make_run, monkeypatch):
    def fail(handle):
        raise OSError(95, "Operation not supported")

    warnings, reporter = [], Reporter()
    reporter.warned = warnings.append
    monkeypatch.setattr(locking, "_take", fail)
    run = make_run()
    train_language_model(run, reporter)
    assert warnings == [f"{run.out} cannot be locked (Operation not supported); let no other run write there meanwhile"]


class Second(Reporter):
    """Starts another run while the first is at its second step, and in the end, where heads are measured."""

    def __init__(self, run):
        self.run, self.told = run, []

    def step(self, step, loss, norm, rate, tokens_per_second):
        if step == 2:
            self.start()

    def start(self, lm=None):
        for more in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(BlockingIOError) as raised:
                train_language_model(dataclasses.replace(self.run, **more))
            self.told.append(str(raised.value))


@pytest.mark.parametrize("begun", slow_after(1, ["new", "resumed", "overwriting"]))
def test_a_second_run_is_told_and_the_first_goes_on(make_run, tmp_path, begun):
    run = make_run()
    if begun != "new":
        train_language_model(make_run(steps=4 if begun == "resumed" else 2))
        run = dataclasses.replace(run, resume=begun == "resumed", overwrite=begun == "overwriting")
    if begun == "resumed":
        (run.out / "checkpoints" / "000000004.checkpoint").unlink()
    second = Second(make_run())
    train_language_model(run, second, then=second.start)
    line = f"{run.out}: another run is writing there; wait for its end, or choose another --out"
    steps_seen = 1 if begun != "resumed" else 0
    assert second.told == [line] * 3 * (1 + steps_seen)
    alone = make_run(out=tmp_path / "alone")
    train_language_model(alone)
    assert (run.out / "model.safetensors").read_bytes() == (alone.out / "model.safetensors").read_bytes()


def test_runs_that_found_the_folder_new_at_the_same_time(make_run, monkeypatch):
    run, held = make_run(), []

    def meanwhile(out, overwrite):
        assert not out.exists()
        held.append(make_folder(out))

    monkeypatch.setattr("saccade.training.run.check_output", meanwhile)
    with pytest.raises(BlockingIOError, match="another run is writing there"):
        train_language_model(run)
    held[0].close()


def test_a_run_that_ended_while_another_prepared_is_kept(make_run, monkeypatch):
    run, before = make_run(), {}

    def meanwhile(out, overwrite):
        monkeypatch.undo()
        train_language_model(run)
        before.update(files_of(out))

    monkeypatch.setattr("saccade.training.run.check_output", meanwhile)
    with pytest.raises(FileExistsError, match="another run has just written there; choose another --out"):
        train_language_model(make_run(steps=3))
    assert before and files_of(run.out) == before


def test_a_folder_that_appears_while_it_is_made(tmp_path, monkeypatch):
    from pathlib import Path

    rename, out = Path.rename, tmp_path / "out"

    def late(self, target):
        (out / "checkpoints").mkdir(parents=True)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    make_folder(out).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
