"""Several seeds in one command: a run for each, and what their figures spread."""

from __future__ import annotations

import json
import shutil
import statistics

import pytest

from saccade import cli, tasks
from tasks.conftest import SMALL


@pytest.mark.parametrize("more", [[], ["--overwrite"], ["--resume"]])
def test_a_folder_that_is_a_run_is_refused(files, learned, tmp_path, capsys, more):
    """A test of it would judge the run that was there before."""
    out = shutil.copytree(learned.folder, tmp_path / "run")
    command = ["train", "classify", str(files / "reviews.csv"), "--out", str(out), "--seeds=2", "--steps=1", *more]
    assert cli.main(command) == 2
    assert (
        "run: holds README.md, expected a new folder, or a folder with only runs of the same --seeds"
        in capsys.readouterr().err
    )
    assert not list(out.glob("seed-*"))


@pytest.mark.slow
def test_two_seeds(files, tmp_path, capsys):
    out, unseen = tmp_path / "run", str(files / "unseen.csv")
    small = [*(f"--{name}={value}" for name, value in {**SMALL, "steps": 20}.items()), "--seed=3", "--seeds=2"]
    command = ["train", "classify", str(files / "reviews.csv"), "--out", str(out), *small]
    assert cli.main(command) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-5].startswith("2 seeds, validation data, mean and standard deviation: accuracy ")
    runs = [out / "seed-3", out / "seed-4"]
    assert told[-4] == f"{out}: models of seed-3, seed-4 written. Next:"
    assert told[-2] == f"  saccade predict {runs[0]} INPUT"
    assert [json.loads((run / "task.json").read_text())["seed"] for run in runs] == [3, 4]
    again = tasks.train("classify", files / "reviews.csv", tmp_path / "alone", **{**SMALL, "steps": 20}, seed=4)
    assert (again.folder / "model.safetensors").read_bytes() == (runs[1] / "model.safetensors").read_bytes()

    assert cli.main(["test", str(out), unseen, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    accuracies = [tasks.test(run, unseen, baseline=False).metrics["accuracy"] for run in runs]
    assert found["metrics"]["accuracy"] == {
        "mean": statistics.fmean(accuracies), "deviation": statistics.stdev(accuracies)
    }  # fmt: skip
    assert cli.main(["test", str(out), unseen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{out}, seeds 3, 4, on {unseen}: 101 examples; mean and") for line in lines)
    assert cli.main(["predict", str(out), "a film"]) == 2
    assert "holds runs of several seeds; expected one of them, such as" in capsys.readouterr().err

    before = [(run / "model.safetensors").read_bytes() for run in runs]
    assert cli.main([*command, "--resume"]) == 0  # what is over is left as it is
    assert [(run / "model.safetensors").read_bytes() for run in runs] == before
    other = [*command[:-2], "--seed=4", "--seeds=2", "--overwrite"]  # seed-3 would be tested with them
    assert cli.main(other) == 2 and "holds seed-3, expected a new folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match="holds no runs of several seeds; expected folders seed-0 and so on"):
        tasks.test_seeds(runs[0], unseen)
