"""Many runs with other settings: what is tried, what is given up, what is kept, and what a kill must not change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import statistics
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from saccade import cli, tasks
from saccade.tasks._runs._registry import TASKS
from saccade.tasks._searching import _search
from saccade.tasks._searching._proposals import Proposal, importance
from saccade.tasks._searching._result import SearchResult
from saccade.tasks._searching._trials import DIVERGED, ENDED, PRUNED, TOO_LARGE, Trial, promote
from saccade.tasks._space import Between, OneOf
from saccade.training import Stopped, loop, run
from tasks.conftest import SMALL, reviews, write_csv
from tasks.test_kills import result, survives_kills
from tasks.test_runs import Clock, Notes
from training.test_killing import server

__all__ = ["server"]  # a fixture
# What is searched: rate, dropout and layers. A look every five steps.
FIXED = {name: SMALL[name] for name in ("width", "heads", "vocabulary", "batch", "precision")} | {
    "steps": 20, "every": 5, "patience": 99
}  # fmt: skip
SPACE = {
    "rate": Between(1e-5, 1e-1, logarithmic=True),
    "dropout": Between(0.0, 0.5, step=0.05),
    "layers": OneOf((1, 2, 4)),
}


def trials_of(folder):
    """All but what the clock says."""
    values = json.loads((folder / "search.json").read_text())
    return [{name: value for name, value in trial.items() if name != "seconds"} for trial in values["trials"]]


def cost(settings):
    """Best at a rate of 6.3e-4 with 2 layers; the dropout does not matter."""
    return (math.log10(settings["rate"]) + 3.2) ** 2 + 2 * (settings["layers"] != 2)


def guided(seed, count=40):
    found = []
    for number in range(1, count + 1):
        first = {"rate": 1e-2, "dropout": 0.3, "layers": 1} if number == 1 else None
        settings = Proposal(SPACE, found, seed, first).settings
        found.append(Trial(number, settings, ENDED, loss=0.0, cost=cost(settings)))
    return found


@pytest.mark.slow
def test_the_best_settings_are_found():
    """Catches trials that are not learned from, and a sign: the best of as many drawn ones is further away."""
    best = [min(guided(seed), key=lambda trial: trial.cost) for seed in (3, 5, 7)]
    assert all(trial.settings["layers"] == 2 for trial in best)
    assert statistics.median(abs(math.log10(trial.settings["rate"]) + 3.2) for trial in best) < 0.03


@pytest.mark.slow
def test_what_mattered_is_said():
    drawn = [Proposal(SPACE, [], seed).settings for seed in range(83)]
    trials = [Trial(n, settings, ENDED, loss=0.0, cost=cost(settings)) for n, settings in enumerate(drawn, 1)]
    shares = importance(SPACE, trials)
    assert list(shares) == ["rate", "layers", "dropout"] and shares["dropout"] < 0.08
    assert sum(shares.values()) == pytest.approx(1.0)
    assert not importance(SPACE, trials[:3])


def test_equally_good_trials_are_told_apart_by_their_loss():
    """Accuracy is often the same: TPE would take the first ones for the good ones."""
    values = np.geomspace(1e-5, 1e-1, 29)
    known = [
        Trial(n, {"rate": rate, "dropout": 0.0, "layers": 1}, ENDED, loss=abs(math.log10(rate) + 2), cost=-0.5)
        for n, rate in enumerate(values, 1)
    ]
    drawn = [Proposal(SPACE, known, seed).settings["rate"] for seed in range(11)]
    assert abs(statistics.median(map(math.log10, drawn)) + 2) < 0.5


def test_settings_have_few_digits_and_stay_in_their_range():
    drawn = [Proposal(SPACE, [], seed).settings for seed in range(31)]
    assert all(float(f"{one['rate']:.3g}") == one["rate"] and 1e-5 <= one["rate"] <= 1e-1 for one in drawn)
    assert {round(20 * one["dropout"], 9) % 1 for one in drawn} == {0.0}
    assert Between(1.2345, 1.2352).rounded(1.2349) == 1.2345


def test_spaces_of_the_tasks():
    recipe = tasks.Classify.scratch
    space = tasks.Classify(width=24).space(recipe, new=True)
    assert space == {
        "rate": Between(5e-5, 5e-3, logarithmic=True), "batch": OneOf((16, 32, 64)),
        "dropout": Between(0.0, 0.5, step=0.05), "layers": OneOf((1, 2, 4)), "width": OneOf((12, 24, 48)),
    }  # fmt: skip
    assert tasks.Classify().space(tasks.Classify.tuning, new=False).keys() == {"rate", "batch"}
    graph = tasks.ClassifyNodes().space(tasks.ClassifyNodes.scratch, new=True)
    assert "batch" not in graph and "attention_dropout" in graph
    assert graph["layers"] == OneOf((2, 4))  # GAT has two or more


@pytest.mark.parametrize("name", TASKS)
def test_every_task_takes_what_is_tried_and_tries_what_is_usual(name):
    task = TASKS[name]()
    fields = {field.name for field in dataclasses.fields(task)}
    for recipe, new in ((task.scratch, True), (task.tuning, False)):
        space = task.space(recipe, new=new)
        assert "rate" in space and (fields & space.keys() if new else not fields & space.keys())
        for option, choice in space.items():
            usual = getattr(recipe if hasattr(recipe, option) else task, option)
            values = choice.values if isinstance(choice, OneOf) else (choice.low, choice.high, usual)
            assert usual in values and min(values) <= usual <= max(values)
            for value in values if option in fields else ():
                dataclasses.replace(task, **{option: value})


def test_no_batch_is_larger_than_the_data(tmp_path):
    """Else a third of all trials is a repetition."""

    def space(count):
        data = write_csv(tmp_path / f"{count}.csv", reviews(count, 3))
        how = {"trials": 3, "minutes": None}
        wanted = _search.search_request("classify", data, tmp_path / "out", {"layers": 1}, **how)
        return wanted.space, wanted.usual, len(wanted.run.training)

    found, usual, most = space(50)
    assert 32 < most < 50 and found["batch"] == OneOf((16, 32, most)) and usual["batch"] == 32
    assert "layers" not in found
    found, usual, most = space(21)
    assert 16 < most < 21 and found["batch"] == OneOf((16, most)) and usual["batch"] == most
    assert "batch" not in space(12)[0]


class Stops(tasks.SearchReporter):
    """Sends a signal in a trial, after a step."""

    def __init__(self, trial, step):
        self._trial, self._step = trial, step

    def began(self, trial, run):
        return contextlib.nullcontext(Notes(self._step if trial.number == self._trial else None))


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search of nine trials that nobody disturbed; never written to."""
    folder = tmp_path_factory.mktemp("search")
    data = write_csv(folder / "reviews.csv", reviews(211, 3))
    return data, tasks.search("classify", data, folder / "out", trials=9, **FIXED)


@pytest.mark.slow
def test_trials_are_given_up_by_the_median_rule(searched):
    """Every decision against the rule, written down once more."""
    _, found = searched
    states = [trial.state for trial in found.trials]
    assert states[:6] == [ENDED] * 6 and PRUNED in states[6:]
    for number, trial in enumerate(found.trials):
        ended = [one for one in found.trials[:number] if one.state == ENDED]
        worse = [
            look
            for look in range(2, 4)
            if len(ended) >= 6
            and look <= len(trial.looks)
            and min(trial.looks[:look]) > statistics.median(one.looks[look - 1] for one in ended)
        ]
        assert (trial.state == PRUNED) == bool(worse)
        assert trial.steps == (5 * worse[0] if worse else 20) and len(trial.looks) == trial.steps // 5


def test_a_picture_has_numbers_of_trials_only(tmp_path):
    """Rates by their logarithm; where all trials are equal one number, not the 0.96 to 1.04 around it."""
    trials = [Trial(n, {"rate": n * 1e-3}, ENDED, (-1.0,), {"accuracy": 1.0}, cost=-1.0) for n in (1, 2)]
    SearchResult(None, trials, {}, ["rate"]).save_picture(tmp_path / "equal.svg")  # type: ignore[arg-type]
    drawn = (tmp_path / "equal.svg").read_text()
    assert drawn.count("<!-- 1 -->") == 3  # of two axes, and the first trial
    assert "0.001 -->" in drawn and "0.002 -->" in drawn and "0.98" not in drawn


@pytest.mark.slow
def test_the_folder_has_the_best_run_as_training_alone_makes_it(searched, tmp_path):
    data, found = searched
    ended = [trial for trial in found.trials if trial.state == ENDED]
    assert found.best.cost == min(trial.cost for trial in ended)
    alone = tasks.train("classify", data, tmp_path / "alone", **FIXED, **found.best.settings)
    out = found.run.folder
    for name in ("model.safetensors", "last.safetensors", "task.json", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (alone.folder / name).read_bytes()
    assert (out / "README.md").read_text().startswith("# out\n")
    assert {path.name for path in out.iterdir()} - {path.name for path in alone.folder.iterdir()} == {
        "search.json", "search.png"
    }  # fmt: skip
    assert len(list((out / "checkpoints").iterdir())) == 2
    found.save_picture(tmp_path / "search.svg")
    assert b"<svg" in (tmp_path / "search.svg").read_bytes()[:2000]
    assert found.trials[0].settings == {"rate": 5e-4, "dropout": 0.3, "layers": 2}  # the usual ones


@pytest.mark.slow
def test_a_search_that_was_stopped_tries_the_same(searched, tmp_path):
    data, whole = searched
    for trial, step in ((1, 3), (4, 20), (7, 7), (9, 11)):
        with contextlib.suppress(Stopped):  # the last step of a trial may be over before the signal is seen
            tasks.search("classify", data, tmp_path, trials=9, resume=trial > 1, reporter=Stops(trial, step), **FIXED)
    found = tasks.search("classify", data, tmp_path, trials=9, resume=True, **FIXED)
    assert trials_of(tmp_path) == trials_of(whole.run.folder)
    assert (tmp_path / "model.safetensors").read_bytes() == (whole.run.folder / "model.safetensors").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in whole.run.folder.iterdir()}
    assert found.best.number == whole.best.number
    with pytest.raises(ValueError, match=r"search.json is of another run: label_smoothing 0.1 \(asked for\) / 0.0"):
        tasks.search("classify", data, tmp_path, resume=True, label_smoothing=0.1, **FIXED)
    more = tasks.search("classify", data, tmp_path, trials=10, resume=True, **FIXED)
    assert len(more.trials) == 10 and trials_of(tmp_path)[:9] == trials_of(whole.run.folder)


def searched_result(out):
    return {**result(out), "search.json": trials_of(out)}


@pytest.mark.slow
def test_kills(server, tmp_path):
    """Also between the end of a trial and its place as the best one."""
    data = str(write_csv(tmp_path / "reviews.csv", reviews(97, 3)))
    options = "--search 3 --layers 1 --heads 2 --width 12 --vocabulary 200 --batch 17 --steps 6 --every 3".split()
    survives_kills(server, tmp_path, ["train", "classify", data, *options], 5, searched_result)


def written_run(folder, mark, step):
    (folder / "checkpoints").mkdir(parents=True)
    names = ("task.json", "curve.jsonl", "model.safetensors", f"checkpoints/{step:09d}.checkpoint")
    for name in names:
        (folder / name).write_text(json.dumps({"task": "classify", "mark": mark}))
    (folder / "README.md").write_text(f"# {folder.name}\n\n{mark}\n")
    return {*names, "README.md"}


def test_a_move_that_was_broken_off_is_finished(tmp_path):
    """Catches files of two runs in one folder."""
    out, folder = tmp_path / "out", tmp_path / "out" / "trial-002"
    written_run(out, "old", 80)
    (out / "anomaly.txt").write_text("old")
    names = written_run(folder, "new", 70)
    (folder / "task.json").rename(folder / "kept")
    with pytest.raises(FileNotFoundError):  # as a kill before the last move
        promote(out, folder)
    assert not (out / "task.json").exists()
    (out / "kept").rename(folder / "task.json")
    promote(out, folder)
    shutil.rmtree(folder)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == names and all("new" in (out / name).read_text() for name in names)
    assert (out / "README.md").read_text() == "# out\n\nnew\n"


@pytest.mark.slow
def test_minutes_are_those_of_all_trials(files, tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(loop, "time", clock)
    for module in (_search, run):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    found = tasks.search("classify", files / "reviews.csv", tmp_path, trials=50, minutes=6.0, **FIXED)
    assert 0.7 * 360 < clock.now <= 360
    assert 3 <= len(found.trials) < 50
    clock.now = 0.0
    alone = tasks.search("classify", files / "reviews.csv", tmp_path / "one", trials=50, minutes=0.35, **FIXED)
    assert clock.now <= 21 and [trial.state for trial in alone.trials] == [ENDED] and alone.best.steps < 20


@pytest.mark.slow
def test_a_trial_that_fails_ends_alone(files, tmp_path, monkeypatch):
    usual = tasks.Classify.loss

    def loss(self, result, batch, *, learning):
        if len(result) > 40:
            raise MemoryError
        return usual(self, result, batch, learning=learning)

    space = {"rate": OneOf((5e-4, 1e30)), "batch": OneOf((32, 48))}
    monkeypatch.setattr(tasks.Classify, "space", lambda *given, **how: space)
    monkeypatch.setattr(tasks.Classify, "loss", loss)
    short = {name: value for name, value in SMALL.items() if name not in space} | {"steps": 4}
    found = tasks.search("classify", files / "reviews.csv", tmp_path, trials=9, **short)
    expected = {(5e-4, 32): ENDED, (1e30, 32): DIVERGED, (5e-4, 48): TOO_LARGE, (1e30, 48): TOO_LARGE}
    states = {(trial.settings["rate"], trial.settings["batch"]): trial.state for trial in found.trials}
    assert all(expected[tried] == state for tried, state in states.items()) and {*states.values()} == {
        ENDED, DIVERGED, TOO_LARGE
    }  # fmt: skip
    assert "diverged" in str(found) and found.best.settings == {"rate": 5e-4, "batch": 32}
    assert [path.name for path in tmp_path.glob("trial*")] == []


@pytest.mark.slow
def test_the_command(files, tmp_path, capsys):
    out = tmp_path / "run"
    fixed = [f"--{name}={value}" for name, value in {**FIXED, "layers": 1, "dropout": 0.3}.items()]
    command = ["train", "classify", str(files / "reviews.csv"), "--out", str(out), "--search", "3", *fixed]
    assert cli.main(command) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"classify: at most 3 trials on 189 examples into {out}, a line after each"
    assert told[1].startswith("trial 1 of 3: rate 0.0005: accuracy ") and told[1].endswith("s (best)")
    assert told[5].startswith(f"{out}: 3 trials (3 ended), the best first")
    assert told[-5] == f"picture: {out / 'search.png'}"
    assert all(trial["settings"].keys() == {"rate"} for trial in trials_of(out))  # what is given is not tried
    assert cli.main(["test", str(out), str(files / "unseen.csv"), "--no-baseline"]) == 0


def test_errors_are_one_line(files, tmp_path, capsys, monkeypatch):
    data = str(files / "reviews.csv")
    given = [f"--{name}={value}" for name, value in SMALL.items()]
    cases = [
        (["--search", "0"], "--search 0: must be at least 1"),
        (["--search", "2", "--seeds", "2"], "--search and --seeds: give one of them"),
        (["--search", "2", "--minutes", "0"], "minutes: must be finite and positive, got 0.0"),
        (["--search", "2", "--dropout", ".3", *given], "search: every option that it could try is given"),
        (["--search", "2", "--resume"], "out: no search to resume (no search.json in it); start the run without"),
    ]
    for more, message in cases:
        assert cli.main(["train", "classify", data, "--out", str(tmp_path / "out"), *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("saccade: error: ") and error.count("\n") == 1 and message in error
    written_run(tmp_path / "other", "old", 80)
    with pytest.raises(FileExistsError, match="^out: .*other is not empty; expected a new or empty folder, or over"):
        tasks.search("classify", data, tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="other: no search to resume"):
        tasks.search("classify", data, tmp_path / "other", resume=True)
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli.main(["train", "classify", data, "--out", str(tmp_path / "out"), "--search", "2"]) == 2
    install = 'pip install "optuna>=4.0" "accelerate>=1.0" "matplotlib>=3.9" "scikit-learn>=1.5"'
    assert capsys.readouterr().err == f"saccade: error: search needs optuna, which is not installed: {install}\n"
