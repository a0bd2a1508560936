"""Ranks that are killed, are stopped, or raise: all others end with the same message, which names rank and reason."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from shared_calls import LINKED, attend, train
from slow_link import slow_link


def free_store():
    """A store in the process of rank 0, as init_process_group makes without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def causes(answers, victim):
    """The reason that each rank but the victim gives, without the operation in which the rank was."""
    others = [answer for rank, answer in enumerate(answers) if rank != victim]
    assert all(isinstance(answer, str) and "RankFailed: " in answer for answer in others), answers
    return {re.search(r": (ranks? (\d|wait).*)", answer)[1] for answer in others}


def drill(folder, size, victim, number, delay, seconds, store=None):
    """Causes and seconds of a signal that `victim` gets `delay` seconds after its third step."""
    group = Ranks(size, folder, seconds, store, mortal=True)
    try:
        group.start(train, folder)
        while not all((folder / str(rank)).exists() for rank in range(size)):
            time.sleep(0.01)
        time.sleep(delay)
        os.kill(group.processes[victim].pid, number)
        began = time.monotonic()
        if number == signal.SIGSTOP:
            group._ends[victim].close()
            group._ends[victim] = _Nothing()
        found = causes(group.answers(), victim)
        return found, time.monotonic() - began
    finally:
        group.processes[victim].kill()
        group.close()


class _Nothing:
    """The end of a rank that will not answer."""

    def recv_bytes(self):
        raise EOFError

    def close(self):
        pass


KILLED = "ended without reporting an error"
STOPPED = "did not answer within 8 s"


@pytest.mark.parametrize("fault", ["raises", pytest.param("leaves", marks=pytest.mark.slow)])
def test_a_rank_that_ends_is_named_to_all(tmp_path, fault):
    """Ranks 0 and 2 wait for rank 1, in a message or in a sum of gradients; gloo alone names a port."""
    group = Ranks(3, tmp_path, mortal=True)
    answers = group.run(train, tmp_path, (1, fault))
    group.close()
    said = {"raises": "rank 1 raised ValueError: a batch of rank one is wrong", "leaves": f"rank 1 {KILLED}"}[fault]
    [cause] = causes(answers, 1)
    assert said in cause
    if fault == "raises":
        assert answers[1].endswith("ValueError: a batch of rank one is wrong")


def test_ranks_in_different_calls_say_so(ranks):
    """Rank 1 makes a plan while the others attend: a message of another size would end the process."""
    answers = ranks(3).run(train, _Nowhere(), (1, "is elsewhere"))
    expected = "ranks disagree: rank 0 is in attention and rank 1 in plan"
    assert [str(answer) for answer in answers] == [expected] * 3 and isinstance(answers[0], ValueError)


class _Nowhere:
    def __truediv__(self, name):
        return self

    def touch(self):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_moment(tmp_path, seed):
    """Every second time the store is in rank 0's process, which may be the one that is killed."""
    draw = random.Random(seed)
    size, delay = 2 + seed % 3, draw.uniform(0, 0.2)
    victim, store = draw.randrange(size), free_store() if seed % 2 else None
    found, passed = drill(tmp_path, size, victim, signal.SIGKILL, delay, 60, store)
    [cause] = found
    assert cause.startswith(f"rank {victim}") and passed < 15
    assert KILLED in cause or (store is not None and victim == 0 and "holds the store" in cause)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "victim", "held"), [(2, 1, False), (3, 0, True), (3, 2, True), (4, 1, False)])
def test_stopped(tmp_path, size, victim, held):
    """Ranks that wait for a stopped one, or for one that waits for it, end within the timeout, 8 s, and a second; on
    shared cores later, but they do not begin another timeout."""
    store = free_store() if held else None
    found, passed = drill(tmp_path, size, victim, signal.SIGSTOP, 0.05, 8, store)
    [cause] = found
    assert cause.startswith(f"rank {victim}") and passed < 16
    assert STOPPED in cause or (held and victim == 0 and "holds the store" in cause)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root")
def test_a_slow_link_changes_no_bit(ranks, tmp_path):
    """15 ms one way and 5 MB/s: messages arrive late and in parts, next to what is computed meanwhile."""
    expected = ranks(2).run(attend, LINKED)
    script = str(Path(__file__).parent / "rank_on_link.py")
    try:
        with slow_link(0.015, 5e6) as spaces:
            processes = [
                subprocess.Popen(
                    ["ip", "netns", "exec", space, sys.executable, script, str(rank), str(tmp_path / str(rank))],
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "link0"},
                )
                for rank, space in enumerate(spaces)
            ]
            assert [process.wait(300) for process in processes] == [0, 0]
    except OSError as error:
        pytest.skip(f"no link between namespaces: {error}")
    for rank, (values, grads) in enumerate(expected):
        got_values, got_grads = torch.load(tmp_path / str(rank), weights_only=True)
        assert all(got_values[name].equal(value) for name, value in values.items())
        assert all(got_grads[name].equal(grad) for name, grad in grads.items())
