"""Cores that other processes hold: how much, and that threads which wait for one another then sleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import saccade
from saccade.models.decoding.beam import BeamSearch, search
from saccade.models.decoding.constraints import Constraints
from saccade.models.decoding.drawing import tokens_after
from saccade.models.decoding.sampling import Sampling
from saccade.support import _machine, _shared_cores
from saccade.support._machine import watch_others
from saccade.support._shared_cores import WAITING, shared_cores, threads_sleep

LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells")


def test_the_processors_time_of_others_is_what_is_not_ours(tmp_path, monkeypatch):
    now = {"perf_counter": 10.0, "process_time": 3.0}
    monkeypatch.setattr(_machine, "time", SimpleNamespace(**{name: lambda name=name: now[name] for name in now}))
    monkeypatch.setattr(_machine.os, "sched_getaffinity", lambda pid: {0, 2}, raising=False)
    monkeypatch.setattr(_machine.os, "sysconf", lambda name: 100)
    times = tmp_path / "stat"

    def tell(first, second):
        # user nice system idle iowait irq softirq steal guest guest_nice
        times.write_text(f"cpu 9 9 9\ncpu0 {first} 0 0 999 7 0 0 0 0 0\ncpu1 555 0 0 0 0 0 0 0 0 0\n{second}\n")

    tell(100, "cpu2 1 2 3 999 7 4 5 6 50 50")
    share = watch_others(times)
    assert share() is None  # no time has passed
    tell(220, "cpu2 11 12 13 999 9 14 15 16 50 50")  # 120 and 60 ticks of 10 ms
    now.update(perf_counter=12.0, process_time=4.4)  # of which 1.4 s are this process's own, in 2 s of two processors
    assert share() == pytest.approx((1.8 - 1.4) / 4)
    assert watch_others(tmp_path / "nowhere")() is None


@pytest.mark.parametrize(
    ("cores", "threads", "shares", "expected"),
    [
        (2, 2, (0.1, 0.3, 0.2, 0.1, None), (False, True, True, False, False)),  # 0.4 cores only keep them asleep
        (16, 16, (0.02, 0.04, 0.0), (False, True, False)),
        (16, 8, (0.4, 0.55, 0.0), (False, True, False)),  # eight cores are free
        (2, 1, (0.9, 0.9), (False, False)),  # one thread waits for nobody
    ],
)
def test_threads_sleep_while_others_take_cores_that_they_need(monkeypatch, cores, threads, shares, expected):
    teams = []
    monkeypatch.setattr(_shared_cores.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(_shared_cores, "_gnu_region", lambda: print)
    monkeypatch.setattr(_shared_cores, "_threads", lambda: threads)
    monkeypatch.setattr(
        _shared_cores, "_IdleTeam", lambda begin, n: teams.append(n) or SimpleNamespace(end=teams.clear)
    )
    monkeypatch.setattr(_shared_cores, "INTERVAL", 0.01)
    watch = _shared_cores._Watch()
    watch.thread.join()  # nobody opens a context
    seen = []
    for share in shares:
        watch._decide(share)
        seen.append(watch.team is not None)
        assert sum(teams) + threads - 1 > cores or not teams  # more threads than processors
    assert tuple(seen) == expected


@LINUX
def test_a_team_is_made_where_pytorch_has_gnus_openmp_and_ends():
    """Otherwise the cure silently does nothing. The oracle is the system's lists of libraries and threads."""
    begin = _shared_cores._gnu_region()
    assert (begin is not None) == ("libgomp" in Path("/proc/self/maps").read_text())
    if begin is None:
        return
    x = torch.randn(31, 4099, requires_grad=True)
    alone = torch.autograd.grad((x @ x.T).sin().sum(), x)[0]
    ended()
    before = len(os.listdir("/proc/self/task"))
    team = _shared_cores._IdleTeam(begin, 5)
    assert torch.equal(torch.autograd.grad((x @ x.T).sin().sum(), x)[0], alone)
    assert len(os.listdir("/proc/self/task")) == before + 5
    team.end()
    for _ in range(10**4):  # the system removes an ended thread a little later
        if len(os.listdir("/proc/self/task")) == before:
            break
    assert len(os.listdir("/proc/self/task")) == before


@LINUX
@pytest.mark.parametrize("variable", [*WAITING, None])
def test_what_the_user_says_about_waiting_stays_and_one_context_watches(monkeypatch, variable):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    ended()
    with shared_cores():
        assert len(_shared_cores._watching) == (variable is None)
        with shared_cores():
            assert len(_shared_cores._watching) == (variable is None)
    ended()
    assert not _shared_cores._watching and not threads_sleep()


def ended():
    """Wait until nothing watches any more."""
    for watch in list(_shared_cores._watching):
        watch.thread.join()


@LINUX
def test_short_contexts_one_after_the_other_are_watched_as_one(monkeypatch):
    """Calls that end before the first look, as short generations do, were never watched."""
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_shared_cores, "INTERVAL", 0.02)
    looks = []
    monkeypatch.setattr(_shared_cores._Watch, "_decide", lambda watch, share: looks.append(watch))
    ended()
    while len(looks) < 5:
        with shared_cores():
            pass
    ended()
    assert len(set(looks)) == 1 and not _shared_cores._watching


@LINUX
@pytest.mark.parametrize("what", ["accelerate", "generate", "beams"])
def test_python_calls_that_compute_for_long_are_watched(monkeypatch, what):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_shared_cores, "INTERVAL", 0.01)
    watched = []

    class Watched:
        def step(self, ids):
            watched.extend(_shared_cores._watching[0].contexts)
            return torch.zeros(len(ids), 7)

        def reorder(self, items):
            pass

    ended()
    start, rules = torch.tensor([[1, 5]]), Constraints(3)
    if what == "accelerate":
        with saccade.accelerate():
            Watched().step(start)
    elif what == "generate":
        list(tokens_after(Watched(), start, Sampling(temperature=0.0), rules))
    else:
        search(Watched(), start, BeamSearch(2), rules)
    assert watched


STEPS = """
import json, os, subprocess, sys, time
cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
import torch
from saccade.support._shared_cores import shared_cores, threads_sleep

torch.set_num_threads(2)
torch.manual_seed(0)
model = torch.nn.TransformerEncoderLayer(96, 4, 192, batch_first=True)
x = torch.randn(32, 64, 96)
optimizer = torch.optim.AdamW(model.parameters())

def pace(seconds):
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        model(x).square().mean().backward()
        optimizer.step(), optimizer.zero_grad()
        count += 1
    return count / (time.perf_counter() - began)

pace(0.5)
neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in cores]
try:
    together, alone = [], []
    for _ in range(3):
        with shared_cores():
            pace(1.5)
            slept = threads_sleep()
            together.append(pace(3))
        torch.set_num_threads(1)
        alone.append(pace(3))
        torch.set_num_threads(2)
finally:
    for one in neighbours:
        one.kill()
print(json.dumps([sorted(together)[1], sorted(alone)[1], slept, len(cores)]))
"""


@LINUX
@pytest.mark.slow
def test_beside_busy_processes_two_threads_do_not_collapse():
    """They took a hundred times as long. What one thread does beside the same processes is the measure."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=environment)
    together, alone, slept, cores = json.loads(done.stdout)
    if cores < 2 or _shared_cores._gnu_region() is None:
        pytest.skip("one core, or another OpenMP")
    assert slept
    assert together > 0.4 * alone
