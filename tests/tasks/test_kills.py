"""A run of a task, killed at any moment and resumed, ends with the same bits as one that nobody disturbed.

What the trainer itself survives is asked in `training/test_killing.py`; this is about what a task adds: its split, its
word pieces, its batches by length, class weights, ties of the metric, task.json and the tokenizer's files.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys

import pytest

from tasks.conftest import reviews, write_csv
from training.test_killing import TIMES, environment, server

__all__ = ["server"]  # a fixture
OPTIONS = """--layers 1 --heads 2 --width 12 --vocabulary 200 --batch 17 --accumulate 2 --precision bf16 --steps 17
--every 5 --checkpoint-every 3 --class-weights --label-smoothing 0.1""".split()


def result(out) -> dict[str, object]:
    found: dict[str, object] = {
        path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".json", ".safetensors")
    }
    lines = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    found["curve"] = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    found["names"] = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    return found


def survives_kills(server, tmp_path, arguments, kills_wanted=10):
    """Kill runs of a command while they train, evaluate and write, resume them, and compare; what files that leaves."""

    def command(out, *more):
        return [*arguments, "--out", str(out), "--no-tensorboard", *more]

    # In a process of its own: what the server has imported and drawn must not matter.
    alone = [sys.executable, "-m", "saccade", *command(tmp_path / "whole")]
    subprocess.run(alone, check=True, stdout=subprocess.DEVNULL, env=environment())
    expected = result(tmp_path / "whole")
    status, ticks = server(command(tmp_path / "again"))
    assert status == 0 and result(tmp_path / "again") == expected
    draws, kills, runs, during = random.Random(7), 0, 0, set()
    while kills < kills_wanted or len(during) < 3:
        out, runs = tmp_path / f"killed-{runs}", runs + 1
        given = command(out)
        tick = draws.choice([number for number, kind in enumerate(ticks, 1) if kind == "ewt"[runs % 3]])
        while True:
            status, told = server(given, tick if kills < kills_wanted or len(during) < 3 else None)
            tick = draws.randrange(1, len(ticks) + 1)
            if status != -signal.SIGKILL:
                break
            kills += 1
            during.add(told[-1])
            given = command(out, *(["--resume"] if out.exists() else []))
        assert status == 0
        assert result(out) == expected
    return expected.keys()


@pytest.mark.slow
def test_ten_kills(server, tmp_path):
    data = str(write_csv(tmp_path / "reviews.csv", reviews(97, 3)))
    files = survives_kills(server, tmp_path, ["train", "classify", data, *OPTIONS])
    assert {"task.json", "tokenizer.json", "config.json", "model.safetensors", "last.safetensors"} <= files
