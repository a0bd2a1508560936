"""Killed at any moment and resumed, a run ends with the same bits as one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import saccade
from saccade.training.run_folder.checkpoint_files import read_checkpoint

HERE = Path(__file__).parent
# Dropout, accumulation with parts that differ in size, bf16, looks and checkpoints that fall together and apart.
OPTIONS = """--layers 2 --heads 2 --width 12 --hidden 16 --context 23 --vocabulary 283 --dropout 0.2 --batch 5
--accumulate 2 --precision bf16 --steps 23 --copying 3 --repeats 0.3 --warmup 2 --every 7 --checkpoint-every 3
--log-every 2 --patience 9""".split()
TIMES = ("seconds", "tokens_per_second")
KILLS = 20


def environment() -> dict[str, str]:
    source = str(Path(saccade.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def command(story: Path, out: Path, *more: str) -> list[str]:
    return ["train", "lm", str(story), "--out", str(out), *OPTIONS, *more]


@pytest.fixture
def server():
    with subprocess.Popen(
        [sys.executable, str(HERE / "killing.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:

        def run(arguments: list[str], tick: int | None = None) -> tuple[int, str]:
            process.stdin.write(json.dumps({"arguments": arguments, "tick": tick}) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            return answer["status"], answer["ticks"]

        yield run
        process.stdin.close()


def result(out: Path) -> dict[str, object]:
    """Everything a run leaves behind, without what the clock says."""
    files = ("model.safetensors", "last.safetensors", "heads.json", "tokenizer.json", "config.json")
    found: dict[str, object] = {name: (out / name).read_bytes() for name in files}
    lines = [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
    found["curve"] = [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
    found["float32"] = {
        name: tensor.numpy().tobytes()
        for name, tensor in read_checkpoint(max((out / "checkpoints").iterdir()))["loop"]["model"].items()
    }
    found["names"] = sorted(path.name for path in out.iterdir()), len(list((out / "checkpoints").iterdir()))
    found["log"] = scalars(out / "tensorboard")
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a log: by tag, the steps and their values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in log.Tags()["scalars"] if tag != "tokens per second"]
    return {tag: [(event.step, event.value) for event in log.Scalars(tag)] for tag in tags}


@pytest.mark.slow
def test_twenty_kills(server, story, tmp_path):
    status, ticks = server(command(story, tmp_path / "whole"))
    assert status == 0
    expected = result(tmp_path / "whole")
    assert [entry["step"] for entry in expected["curve"]] == [7, 14, 21, 26]
    assert [step for step, _ in expected["log"]["loss/training"]] == list(range(2, 27, 2))
    draws, kills, runs, during = random.Random(20), 0, 0, set()
    while kills < KILLS:
        out, runs = tmp_path / f"killed-{runs}", runs + 1
        arguments = command(story, out)
        # Each run is killed in one kind of moment first, so that none depends on the draw, and then in any.
        tick = draws.choice([number for number, kind in enumerate(ticks, 1) if kind == "ewt"[runs % 3]])
        while True:
            status, told = server(arguments, tick if kills < KILLS else None)
            tick = draws.randrange(1, len(ticks) + 1)
            if status != -signal.SIGKILL:
                break
            kills += 1
            during.add(told[-1])
            # Killed before its folder was there, a run is begun again.
            arguments = command(story, out, *(["--resume"] if out.exists() else []))
        assert status == 0
        assert result(out) == expected
    assert runs > 2
    assert during == {"t", "e", "w"}  # in training, in evaluating and in writing


@pytest.mark.slow
def test_kills_in_every_file_operation_of_the_beginning(server, story, tmp_path):
    short = ("--steps", "2", "--copying", "0")
    server(command(story, tmp_path / "whole", *short))
    expected = result(tmp_path / "whole")
    begun = 0
    for tick in range(1, 10):
        out = tmp_path / str(tick)
        assert server(command(story, out, *short), tick)[0] == -signal.SIGKILL
        begun += out.exists()
        assert server(command(story, out, *short, *(["--resume"] if out.exists() else [])))[0] == 0
        assert result(out) == expected
    assert 0 < begun < 9


@pytest.mark.slow
def test_killed_from_outside(story, tmp_path):
    arguments = [sys.executable, "-m", "saccade", *command(story, tmp_path / "whole")]
    quiet = {"stdout": subprocess.DEVNULL, "env": environment()}
    subprocess.run(arguments, check=True, **quiet)
    out, draws = tmp_path / "killed", random.Random(3)
    arguments = [sys.executable, "-m", "saccade", *command(story, out)]
    for wanted in (3, 9, 15):
        with subprocess.Popen(arguments, **quiet) as process:
            while process.poll() is None and not any(
                int(path.stem) >= wanted for path in (out / "checkpoints").glob("0*.checkpoint")
            ):
                time.sleep(0.001)
            time.sleep(draws.random() * 0.05)
            process.kill()
        arguments = [sys.executable, "-m", "saccade", *command(story, out, "--resume")]
    subprocess.run(arguments, check=True, **quiet)
    assert result(out) == result(tmp_path / "whole")
