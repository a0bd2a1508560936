"""`saccade train lm`, from the command line to the files it writes."""

from __future__ import annotations

import json
import signal

import pytest

from saccade import cli
from saccade.models import load


def files_of(folder):
    """The bytes of every file below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SMALL = "--layers 1 --heads 2 --width 12 --hidden 16 --context 23 --batch 3 --warmup 2 --precision no".split()


@pytest.fixture
def train(story, tmp_path):
    def call(*options, text=story):
        return cli.main(["train", "lm", str(text), "--out", str(tmp_path / "out"), *SMALL, *map(str, options)])

    return call


@pytest.mark.slow
def test_trains_measures_heads_and_says_what_to_do_next(train, tmp_path, capsys):
    assert train("--steps", 4, "--every", 2, "--vocabulary", 283) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert captured.out.count("\nstep ") == 2
    assert "saccade generate --model" in captured.out
    lm = load(tmp_path / "out")
    assert lm.tokenizer.vocabulary == 283
    assert lm.model.config.context == 23
    assert {(head["layer"], head["head"]) for head in lm.heads["heads"]} == {(0, 0), (0, 1)}
    assert len((tmp_path / "out" / "curve.jsonl").read_text().splitlines()) == 2


def test_characters(train, tmp_path, capsys):
    assert train("--steps", 2, "--characters") == 0
    assert load(tmp_path / "out").tokenizer.vocabulary < 40


@pytest.mark.slow
def test_starting_from_a_model_and_copying_first(train, tmp_path, capsys):
    assert train("--steps", 2, "--vocabulary", 283) == 0
    (tmp_path / "out").rename(tmp_path / "first")
    assert train("--steps", 2, "--from", tmp_path / "first", "--copying", 3, "--repeats", 0.5, "--every", 5) == 0
    (entry,) = (json.loads(line) for line in (tmp_path / "out" / "curve.jsonl").read_text().splitlines())
    assert entry["step"] == 5
    card = (tmp_path / "out" / "README.md").read_text()
    assert "3 steps before the text, on random tokens over and over; in 50% of the windows" in card


@pytest.mark.slow
def test_sizes_that_are_not_given_are_those_of_the_model_to_start_from(train, story, tmp_path, capsys):
    assert train("--steps", 2, "--characters") == 0
    given = ["--from", str(tmp_path / "out"), "--steps", "2", "--out", str(tmp_path / "next")]
    assert cli.main(["train", "lm", str(story), *given, "--dropout", "0"]) == 0
    first, second = (load(tmp_path / name).model.config.to_dict() for name in ("out", "next"))
    assert second == {**first, "dropout": 0.0}
    assert cli.main(["train", "lm", str(story), *given, "--overwrite", "--context", "11"]) == 2
    assert "context 23 (asked for 11)" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_seed_writes_the_same_model(train, tmp_path):
    for name in ("first", "second"):
        assert train("--steps", 3, "--seed", 7) == 0
        (tmp_path / "out").rename(tmp_path / name)
    for name in ("model.safetensors", "tokenizer.json", "heads.json", "config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def _story_and(tmp_path, content):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        ([], None, "no such file or folder"),
        ([], b"\x89PNG\xff", "not UTF-8 text"),
        ([], b"", "empty"),
        ([], b"a few words", "too short for one window of 23 (the context); give more text or a smaller --context"),
        (["--heads", "5"], b"words " * 90, "heads: must divide the width, got heads=5 and width=12"),
        (["--vocabulary", "9"], b"words " * 90, "vocabulary: 256 bytes and the start token need at least 257, got 9"),
        (["--steps", "0"], b"words " * 90, "steps: must be at least 1, got 0"),
        (["--steps", "many"], b"words " * 90, "'--steps'"),
        (
            ["--precision", "fp8"],
            b"words " * 90,
            "precision: expected 'auto', 'bf16' (bfloat16), 'fp16' (float16) or 'no' (float32, fp32), got 'fp8'",
        ),
        (["--hold-out", "/nowhere.txt"], b"words " * 90, "/nowhere.txt: no such file or folder"),
        (["--from", "/nowhere"], b"words " * 90, "/nowhere: no such model folder"),
        (["--colour"], b"words " * 90, "--colour"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(train, tmp_path, capsys, options, content, message):
    text = tmp_path / "missing.txt" if content is None else _story_and(tmp_path, content)
    assert train(*options, text=text) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("saccade: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_existing_output_is_kept(train, tmp_path, capsys):
    assert train("--steps", 2) == 0
    before = files_of(tmp_path / "out")
    assert train("--steps", 2) == 2
    assert "out is not empty; expected a new or empty folder, or --overwrite or --resume" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == before
    assert train("--steps", 2, "--overwrite", "--characters") == 0


def test_ctrl_c_says_what_is_kept(train, tmp_path, capsys, monkeypatch):
    def stop(self, step, *_):
        if step == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("saccade.training.progress.ConsoleReporter.step", stop)
    assert train("--steps", 9, "--every", 9) == 130
    assert "out keeps the best weights and the last; --resume goes on" in capsys.readouterr().err
    load(tmp_path / "out")


def test_without_accelerate_there_is_one_line(train, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train("--steps", 2) == 2
    assert 'pip install "accelerate>=1.0"' in capsys.readouterr().err
