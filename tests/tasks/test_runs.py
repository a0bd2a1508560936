"""Runs of a task: folders, kills, budgets of time, and what they are tested beside."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from rich.console import Console

from saccade import tasks
from saccade.tasks._runs._request import settings_for
from saccade.tasks._runs._training import request, train_requested
from saccade.tasks._task import Recipe
from saccade.training import (
    EvaluationSettings,
    Execution,
    LanguageRun,
    LanguageSettings,
    Reporter,
    Settings,
    Stopped,
    loop as training_loop,
    train_language_model,
)
from saccade.training.loop import Progress
from saccade.training.progress import ConsoleReporter
from saccade.training.run_folder.checkpoint_files import read_checkpoint
from slowly import slow_but
from tasks.conftest import SMALL, reviews, write_csv
from training.test_run import files_of

SHORT = {**SMALL, "steps": 7, "every": 3, "checkpoint_every": 2, "dropout": 0.2, "tensorboard": False}


class Notes(Reporter):
    """Keeps what it is told, and sends a signal at a step."""

    def __init__(self, stop=None):
        self.steps, self.warnings, self._stop = [], [], stop

    def step(self, step, loss, norm, rate, tokens_per_second):
        self.steps.append(step)
        if step == self._stop:
            signal.raise_signal(signal.SIGTERM)

    def warned(self, message):
        self.warnings.append(message)


def without_times(folder):
    """All that a run leaves but for times: curve and checkpoints are compared by what they hold."""
    files = files_of(folder)
    curve = [json.loads(line) for line in files.pop("curve.jsonl").decode().splitlines()]
    for entry in curve:
        del entry["seconds"], entry["tokens_per_second"]
    newest = max(name for name in files if name.startswith("checkpoints/"))
    state = read_checkpoint(folder / newest)["loop"]
    kept = {name: value for name, value in files.items() if "/" not in name and name != "README.md"}
    return kept, curve, state["model"], state["optimizer"]["state"]


@pytest.mark.parametrize("stop", slow_but([1, 4, 6], 4))
def test_a_run_that_was_stopped_ends_with_the_same_bits(files, tmp_path, stop):
    """Catches anything of data, model or batches that is neither a function of the step nor in the checkpoint."""
    tasks.train("classify", files / "reviews.csv", tmp_path / "whole", **SHORT)
    with pytest.raises(Stopped):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", reporter=Notes(stop), **SHORT)
    torch.manual_seed(1234)  # another process has another state
    notes = Notes()
    tasks.train("classify", files / "reviews.csv", tmp_path / "out", resume=True, reporter=notes, **SHORT)
    assert notes.steps == list(range(stop + 1, 8))
    one, other = without_times(tmp_path / "whole"), without_times(tmp_path / "out")
    assert one[:2] == other[:2]
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])
    torch.testing.assert_close(one[3], other[3], rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_that_is_over_goes_on_with_more_steps(files, tmp_path):
    """Catches settings that follow from the number of steps: they would be of another run."""
    options = {name: value for name, value in SHORT.items() if name != "warmup"}
    tasks.train("classify", files / "reviews.csv", tmp_path / "out", **options)
    notes = Notes()
    more = {**options, "steps": 29}
    tasks.train("classify", files / "reviews.csv", tmp_path / "out", resume=True, reporter=notes, **more)
    assert notes.steps == list(range(8, 30))


@pytest.mark.slow
def test_a_run_goes_on_without_what_it_began_with(learned, files, tmp_path):
    """The checkpoint has all of it; another beginning that is there is still one."""
    begun, other = (shutil.copytree(learned.folder, tmp_path / name) for name in ("begun", "other"))
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    tasks.train("classify", files / "reviews.csv", tmp_path / "whole", initial=begun, **SHORT)
    with pytest.raises(Stopped):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", initial=begun, reporter=Notes(3), **SHORT)
    shutil.rmtree(begun)
    with pytest.raises(ValueError, match="is of another run: from [0-9a-f]{12} .asked for. / [0-9a-f]{12}"):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", initial=other, resume=True, **SHORT)
    tasks.train("classify", files / "reviews.csv", tmp_path / "out", initial=begun, resume=True, **SHORT)
    whole, out = (without_times(tmp_path / name)[2] for name in ("whole", "out"))
    assert all(torch.equal(tensor, out[name]) for name, tensor in whole.items())
    with pytest.raises(FileNotFoundError, match="begun: no such model folder"):
        tasks.train("classify", files / "reviews.csv", tmp_path / "new", initial=begun, **SHORT)


def test_resuming_asks_for_the_same_data_and_options(files, tmp_path):
    data = shutil.copy(files / "reviews.csv", tmp_path / "reviews.csv")
    with pytest.raises(Stopped):
        tasks.train("classify", data, tmp_path / "out", reporter=Notes(2), **SHORT)
    message = r"of another run: batch 5 \(asked for\) / 19 .*; label_smoothing 0.1 \(asked for\) / 0.0"
    with pytest.raises(ValueError, match=message):
        tasks.train("classify", data, tmp_path / "out", resume=True, **{**SHORT, "batch": 5, "label_smoothing": 0.1})
    write_csv(tmp_path / "reviews.csv", reviews(212, 3))
    with pytest.raises(ValueError, match="the training data is not the one it was trained with .SHA-256"):
        tasks.train("classify", data, tmp_path / "out", resume=True, **SHORT)


def test_a_folder_of_another_task(files, learned, tmp_path):
    """No command takes one run for another, and nothing in the folder is touched."""
    text = tmp_path / "story.txt"
    text.write_text("the cat sat on the mat. " * 40)
    small = {"layers": 1, "heads": 2, "width": 12, "hidden": 16, "context": 11}
    language = LanguageRun(
        text, tmp_path / "lm", LanguageSettings(2, batch=3, execution=Execution("no")), small, vocabulary=270
    )
    train_language_model(language)
    before = files_of(language.out)
    with pytest.raises(ValueError, match="lm: is a run of the task lm, not of classify; give a folder of classify"):
        tasks.train("classify", files / "reviews.csv", language.out, resume=True, **SHORT)
    assert files_of(language.out) == before
    with pytest.raises(ValueError, match="learned: is a run of the task classify, not of lm; give a folder of lm"):
        train_language_model(dataclasses.replace(language, out=learned.folder, resume=True))
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="begun: has no model yet; give its `saccade train` again, with --resume to"):
        tasks.predict(tmp_path / "begun", "a film")
    with pytest.raises(ValueError, match="is not a run of `saccade train`, it has no task.json"):
        tasks.predict(tmp_path, "a film")
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder; expected the --out"):
        tasks.predict(tmp_path / "nowhere", "a film")


def test_overwriting_leaves_nothing_of_another_task(files, learned, tmp_path):
    """Tokenizer files of the old model would be read with the new one."""
    out = tmp_path / "out"
    shutil.copytree(learned.folder, out)
    text = tmp_path / "story.txt"
    text.write_text("the cat sat on the mat. " * 40)
    small = {"layers": 1, "heads": 2, "width": 12, "hidden": 16, "context": 11}
    settings = LanguageSettings(2, batch=3, execution=Execution("no"))
    with pytest.raises(FileExistsError, match=r"^out: \S*out is not empty; expected a new or empty folder, or over"):
        tasks.train("classify", files / "reviews.csv", out, **SHORT)
    train_language_model(LanguageRun(text, out, settings, small, vocabulary=270, overwrite=True))
    assert json.loads((out / "task.json").read_text())["task"] == "lm"
    assert "tokenizer_config.json" not in files_of(out)


@pytest.mark.slow
def test_a_second_run_may_have_another_precision(files, tmp_path):
    """Accelerate alone refuses, with words about environments; a notebook has many runs."""
    for precision in ("no", "bf16"):
        notes = Notes()
        options = {**SHORT, "steps": 1, "precision": precision}
        tasks.train("classify", files / "reviews.csv", tmp_path / precision, reporter=notes, **options)
        assert notes.steps == [1]
        assert f"precision {precision}" in (tmp_path / precision / "README.md").read_text()


# --- a budget of time -------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only where the loop asks: 1 a step, and as much more a look."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize("minutes", slow_but([0.5, 2.0], 0.5))
def test_a_run_ends_in_time_with_its_model(files, tmp_path, monkeypatch, minutes):
    clock, rates = Clock(), []
    monkeypatch.setattr(training_loop, "time", clock)

    class Rates(Reporter):
        def step(self, step, loss, norm, rate, tokens_per_second):
            rates.append(rate)

    options = {**SMALL, "steps": None, "minutes": minutes, "every": 1000, "warmup": 3, "patience": 99}
    run = tasks.train("classify", files / "reviews.csv", tmp_path / "out", reporter=Rates(), **options)
    assert 0.6 * 60 * minutes < clock.now <= 60 * minutes
    curve = [json.loads(line) for line in (run.folder / "curve.jsonl").read_text().splitlines()]
    assert len(curve) == 2  # an early look that tells how long one takes, and the last
    assert curve[0]["seconds"] < 60 * minutes / 4
    assert max(rates) <= SMALL["rate"] and rates[-1] < 0.4 * SMALL["rate"] < rates[3]


def test_there_is_time_left_for_the_last_looks():
    settings = Settings(None, minutes=1.0, looks=EvaluationSettings(every=99))
    assert not Progress(step=0, seconds=70.0).over(settings)  # without a step there is no model
    assert Progress(step=1, seconds=70.0).over(settings)
    assert not Progress(step=5, seconds=40.0, longest=6.0).over(settings)
    assert Progress(step=5, seconds=43.0, longest=6.0).over(settings)
    assert not Progress(step=5, seconds=7.0).look_due(settings)
    assert Progress(step=5, seconds=8.0).look_due(settings)
    assert not Progress(step=5, seconds=8.0, validation=1.0).look_due(settings)
    with pytest.raises(ValueError, match="steps, minutes: at least one must be given, got neither"):
        Settings(None)
    with pytest.raises(ValueError, match="minutes: must be finite and positive, got 0"):
        Settings(None, minutes=0)


def test_patience_sees_a_lower_loss_at_the_same_metric():
    """Accuracy stays at chance while a model begins to learn: without the loss a run would end there."""
    looks, progress = EvaluationSettings(patience=2), Progress()
    waited = []
    for cost, loss in ((-0.5, 0.9), (-0.5, 0.8), (-0.5, 0.85), (-0.4, 0.1), (-0.5, 0.7), (-0.6, 2.0), (-0.6, 2.0)):
        progress.looked(cost, looks, counts=True, loss=loss)
        waited.append(progress.waited)
    assert waited == [0, 0, 1, 2, 0, 0, 1]


def test_settings_follow_from_the_data():
    recipe = Recipe(epochs=7, rate=0.25)
    found = settings_for(recipe, 101, {"batch": 20, "rate": None, "patience": 3})
    assert (found.steps, found.warmup, found.rate, found.looks.every, found.looks.patience) == (35, 3, 0.25, 5, 3)
    assert settings_for(recipe, 101, {"epochs": 2}).steps == 6
    assert settings_for(recipe, 101, {"minutes": 2.0}).steps is None
    assert settings_for(recipe, 101, {"minutes": 2.0, "steps": 9}).steps == 9
    both = settings_for(recipe, 101, {"minutes": 2.0, "epochs": 2, "batch": 20})
    assert (both.steps, both.minutes) == (10, 2.0)  # whichever ends first
    assert settings_for(recipe, 3, {}).steps == 7
    assert settings_for(recipe, 3, {}).batch == 3  # or micro-batches of it could be empty


@pytest.mark.slow
def test_a_terminal_shows_the_metric_and_the_time_left(files, tmp_path):
    written = io.StringIO()
    run = request("classify", files / "reviews.csv", tmp_path / "out", {**SHORT, "minutes": 5.0})
    with ConsoleReporter(run, Console(file=written, width=140, force_terminal=True)) as reporter:
        train_requested(run, reporter, time.perf_counter())
    shown = written.getvalue()
    assert "189 examples to train on, 22 to validate; 7 steps, at most 5 minutes into" in shown
    bars = [line for line in re.split("[\r\n]", shown) if "step 7/7" in line]
    assert re.search(r"loss 0\.\d{3}.*accuracy [01]\.\d{3}.*left", re.sub("\x1b[^m]*m", "", bars[-1]))


# --- tests ------------------------------------------------------------------------------------------------------------


def test_the_baseline_learns_from_what_the_model_learned_from(learned, files):
    """An independent pipeline on the same split: no example that is validated or tested may be in it."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.pipeline import make_pipeline

    report = tasks.test(learned, files / "unseen.csv")
    ((name, metrics),) = report.baselines.items()
    strength = float(name.rpartition("C = ")[2].rstrip(")"))
    training, _ = learned.task.split(learned.task.read(files / "reviews.csv"), 0.1, 0)
    assert len(training) == 189
    vectors = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b")
    simple = make_pipeline(vectors, LogisticRegression(C=strength, max_iter=1000))
    simple.fit([example.text for example in training], [example.label for example in training])
    tested = learned.task.read(files / "unseen.csv")
    found = simple.predict([example.text for example in tested])
    truth = [example.label for example in tested]
    assert metrics["accuracy"] == accuracy_score(truth, found)
    assert metrics["macro F1"] == pytest.approx(f1_score(truth, found, average="macro"))


def test_a_model_that_loses_to_the_baseline_says_so_first(files, tmp_path):
    run = tasks.train("classify", files / "reviews.csv", tmp_path / "out", **{**SHORT, "steps": 1})
    report = tasks.test(run, files / "unseen.csv")
    assert report.better == list(report.baselines)
    expected = "The baseline is better than this model: TF-IDF with logistic regression (C = "
    assert str(report).startswith(expected)
    assert report.as_dict()["better_baselines"] == report.better


def test_no_baseline_without_its_data(files, tmp_path):
    data = shutil.copy(files / "reviews.csv", tmp_path / "reviews.csv")
    run = tasks.train("classify", data, tmp_path / "out", **SHORT)
    write_csv(tmp_path / "reviews.csv", reviews(31, 8))
    report = tasks.test(run, files / "unseen.csv")
    assert not report.baselines
    assert "no baseline: " in str(report) and "is not what the run was trained on any more" in report.note
    (tmp_path / "reviews.csv").unlink()
    assert "reviews.csv, which the run was trained on, is not there any more" in str(
        tasks.test(run.folder, files / "unseen.csv")
    )


def emoji(folder):
    return write_csv(folder / "data.csv", [("🙂 🙂", "good"), ("🙁 🙁", "bad")] * 20)


def answers_of_all_words(folder):
    names = ("Ada", "Eva")
    lines = [
        json.dumps({"question": "who ?", "context": name, "answers": [{"text": name, "start": 0}]}) for name in names
    ]
    (folder / "data.jsonl").write_text("".join(f"{line}\n" for line in lines * 20))
    return folder / "data.jsonl"


@pytest.mark.parametrize(
    ("task", "made", "reason"),
    [("classify", emoji, "empty vocabulary"), ("answer", answers_of_all_words, "needs samples of at least 2 classes")],
)
def test_a_baseline_that_cannot_learn_leaves_the_models_figures(tmp_path, task, made, reason):
    data = made(tmp_path)
    run = tasks.train(task, data, tmp_path / "out", **{**SHORT, "steps": 1})
    report = tasks.test(run, data)
    assert report.metrics == tasks.test(run, data, baseline=False).metrics and not report.baselines
    assert report.note.startswith("no baseline: ") and reason in report.note and "\n" not in report.note


@pytest.mark.slow
def test_the_picture(learned, files, tmp_path):
    report = tasks.test(learned, files / "unseen.csv", baseline=False)
    report.save_picture(tmp_path / "confusion.svg")
    assert b"<svg" in (tmp_path / "confusion.svg").read_bytes()[:2000]
    report.save_picture(tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="path: pictures are written to a name that ends in .png or .svg, got"):
        report.save_picture(tmp_path / "confusion.gif")
    assert report.protocol in str(report).splitlines() and report.protocol == (
        f"protocol: trained on {files / 'reviews.csv'}, weights selected on a share of 0.1 of it (seed 0); accuracy "
        "and macro F1 as scikit-learn counts them, calibration error over 15 bins"
    )
    rows = [line.split() for line in str(report).splitlines()[-2:]]
    counts = np.array([[int(count) for count in row[1:]] for row in rows])
    assert counts.tolist() == report.tested.details["confusion"] and counts.sum() == 101


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "options", "advice"),
    [
        (10, {}, "give --batch 19 --accumulate 2, the same step in parts of 10, which fit"),
        (9, {}, "give --batch 19 --accumulate 4, the same step in parts of 5, which fit"),
        (2, {"accumulate": 7}, "give --batch 19 --accumulate 14, the same step in parts of 2, which fit"),
        (1, {"accumulate": 12}, "give --batch 19 --accumulate 19, the same step in parts of 1, which fit"),
        (0, {"accumulate": 12}, "parts of one item do not fit either; give --checkpointing, shorter"),
        (0, {"accumulate": 19}, "its parts are of one item already; give --checkpointing, shorter items or a smaller"),
    ],
)
def test_too_little_memory_says_which_parts_fit(files, tmp_path, monkeypatch, room, options, advice):
    """By the allocator's own error, in the second step: what is there stays."""

    class Greedy(Notes):
        def step(self, step, loss, norm, rate, tokens_per_second):
            with_room_for(monkeypatch, room)

    with pytest.raises(ValueError, match=f"training: step 2 needs more memory than is available; {advice}"):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", reporter=Greedy(), **{**SHORT, **options})
    assert list((tmp_path / "out" / "checkpoints").glob("*.checkpoint"))


def with_room_for(monkeypatch, rows):
    """More rows at once get the allocator's own error."""
    forward = tasks.Classify.forward

    def greedy(self, model, batch, observe=None):
        if len(batch["input_ids"]) > rows:
            torch.empty(2**46, dtype=torch.uint8)
        return forward(self, model, batch, observe)

    monkeypatch.setattr(tasks.Classify, "forward", greedy)


@pytest.mark.slow
def test_a_look_has_no_more_rows_than_parts_of_a_step(files, tmp_path, monkeypatch):
    sizes, forward = [], tasks.Classify.forward

    def noted(self, model, batch, observe=None):
        sizes.append((model.training, len(batch["input_ids"])))
        return forward(self, model, batch, observe)

    monkeypatch.setattr(tasks.Classify, "forward", noted)
    tasks.train("classify", files / "reviews.csv", tmp_path / "out", **{**SHORT, "accumulate": 4})
    assert max(size for learns, size in sizes if learns) == 5 and max(size for learns, size in sizes if not learns) == 4


def test_a_look_that_needs_too_much_says_so_in_a_line(files, tmp_path, monkeypatch):
    class Greedy(Notes):
        def step(self, step, loss, norm, rate, tokens_per_second):
            with_room_for(monkeypatch, 0)

    with pytest.raises(ValueError, match="training: the evaluation after step 1 needs more memory than is available"):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", reporter=Greedy(), **{**SHORT, "every": 1})


def test_what_is_predicted_is_split_until_it_fits(learned, files, monkeypatch):
    inputs = [text for text, _ in reviews(53, 7)]
    expected = tasks.predict(learned, inputs)
    with_room_for(monkeypatch, 5)
    for one, other in zip(tasks.predict(learned, inputs), expected, strict=True):
        assert one["text"] == other["text"] and one["probabilities"] == pytest.approx(other["probabilities"], rel=1e-5)
    with_room_for(monkeypatch, 0)
    with pytest.raises(ValueError, match="classify: one input alone needs more memory than is available; give shorter"):
        tasks.predict(learned, inputs)


def test_another_error_stays_what_it_is(files, tmp_path, monkeypatch):
    def fails(*given, **how):
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(tasks.Classify, "loss", fails)
    with pytest.raises(RuntimeError, match="sizes do not match"):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", **SHORT)
