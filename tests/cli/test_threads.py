"""How many threads a command computes on, and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from saccade.cli import main
from saccade.support._shared_cores import WAITING

SHOWN = """
import os, sys
sys.argv = ["saccade", "generate", "Once", "--tokens", "1", "--threads", "1"]
from saccade.cli import main
main()
import torch
print(torch.get_num_threads(), *(f"{name}={os.environ[name]}" for name in %r if name in os.environ))
"""


def shown(**more):
    kept = {name: value for name, value in os.environ.items() if name not in (*WAITING, "OMP_NUM_THREADS")}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **more}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN % (WAITING,)], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_command_computes_on_its_threads_and_leaves_the_way_they_wait_to_the_user():
    """Threads that sleep double the time of a step on an idle machine."""
    assert shown() == "1"
    assert shown(GOMP_SPINCOUNT="7") == "1 GOMP_SPINCOUNT=7"


def test_a_program_that_calls_the_command_keeps_environment_and_threads(capsys):
    before, threads = dict(os.environ), torch.get_num_threads()
    assert main(["generate", "Once", "--tokens", "1", "--threads", "1"]) == 0
    assert (dict(os.environ), torch.get_num_threads()) == (before, threads)


@pytest.mark.parametrize("command", ["generate x", "train lm x", "embed x"])
def test_threads_below_one_are_an_error_before_any_work(command, capsys):
    assert main([*command.split(), "--threads", "0"]) == 2
    assert capsys.readouterr().err == "saccade: error: --threads: must be at least 1, got 0\n"
