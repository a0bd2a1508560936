"""`saccade step`, from the command line to what it prints and writes."""

from __future__ import annotations

import io
import json
import sys

import checkpoints
import pytest

import saccade
from saccade import cli

SENTENCE = "The cat sat on the mat because it was soft, and it was dark."


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SENTENCE.encode())))


def run(capsys, *arguments):
    status = cli.main(["step", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("saccade: error: ") and err.count("\n") == 1
    return err


@pytest.mark.slow
def test_it_prints_what_python_prints(capsys):
    options = ["--head", "1.4", "--word", "it:2", "--without", "scale, mask"]
    status, out, err = run(capsys, SENTENCE, *options)
    assert (status, err) == (0, "") and "\x1b" not in out
    assert out == str(saccade.step(SENTENCE, (1, 4), "it:2", without=["scale", "mask"]))
    assert run(capsys, "-", *options)[1] == out  # from standard input
    assert run(capsys, SENTENCE, *options, "--nth", "2", "--word", "it")[1] == out


@pytest.mark.slow
def test_json_is_all_there_is(capsys):
    status, out, err = run(capsys, SENTENCE, "--word", "it", "--head", "1.4", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(saccade.step(SENTENCE, (1, 4), "it").as_json()))


@pytest.mark.slow
def test_the_page_is_written_and_not_over_others(capsys, tmp_path):
    status, out, _ = run(capsys, SENTENCE, "--head", "1.4", "--word", "it", "--out", "step.html")
    assert (status, out) == (0, "Page  step.html\n")
    assert (tmp_path / "step.html").read_text(encoding="utf-8") == saccade.step(SENTENCE, (1, 4), "it").html()
    assert run(capsys, "--example", "--out", "step.html")[0] == 0  # one of ours
    (tmp_path / "mine.html").write_text("mine")
    assert "--force replaces it" in refused(capsys, SENTENCE, "--out", "mine.html")
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert run(capsys, "--example", "--out", "mine.html", "--force")[0] == 0


def test_a_word_that_is_there_twice_is_told(capsys):
    status, out, _ = run(capsys, SENTENCE, "--word", "it", "--head", "1.4")
    assert status == 0 and "'it' occurs 2 times: the first is used (it:2 is the next)" in " ".join(out.split())


@pytest.mark.slow
def test_an_encoder_decoder(capsys, tmp_path):
    checkpoints.bart(tmp_path / "bart")
    given = ["The cat sat on the mat.", "--model", "bart", "--target", "Nobody knows the old man.", "--word", "knows"]
    status, out, err = run(capsys, *given, "--head", "cross.1.2")
    assert (status, err) == (0, "") and out.startswith("Head cross.1.2, 'knows' asks: ")
    status, out, _ = run(capsys, *given, "--head", "decoder.2.0", "--json")
    assert status == 0 and (json.loads(out)["part"], json.loads(out)["layer"]) == ("decoder", 2)
    assert "'cat' is not in the target" in refused(capsys, *given[:-1], "cat", "--head", "cross.1.2")
    assert "not read by the encoder" in refused(capsys, *given, "--head", "1.0")


def test_the_example_needs_no_text(capsys):
    status, out, _ = run(capsys, "--example", "--without", "scale")
    assert status == 0 and "16.604769" in out and "Weights without scale" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([SENTENCE, "--word", "dog"], "word: 'dog' is not in the text; the text begins with 'The', 'cat', 'sat'"),
        ([SENTENCE, "--word", "sta"], "like it there is 'sat'"),
        ([SENTENCE, "--word", "it:3"], "'it' occurs 2 times, so there is no occurrence 3"),
        ([SENTENCE, "--head", "4.0"], "head: 4.0 does not exist; this model has the layers 0 to 3"),
        ([SENTENCE, "--head", "four"], "--head four: expected layer.head"),
        (
            [SENTENCE, "--head", "1.99"],
            "head: 1.99 does not exist; this model has the layers 0 to 3, each with the heads 0",
        ),
        (
            [SENTENCE, "--head", "cross.1"],
            "--head cross.1: expected layer.head, such as 1.4, or encoder.1.4",
        ),
        ([SENTENCE, "--head", "cross.1.2"], "head: cross.1.2 is of an encoder-decoder; embedded has heads such as 1.4"),
        ([SENTENCE, "--target", "Le chat"], "target: embedded reads none; only an encoder-decoder"),
        ([SENTENCE, "--nth", "0"], "nth: it is the occurrence of a word; pass the word, too"),
        (
            [SENTENCE, "--word", "it", "--nth", "0"],
            "--nth: expected 1 to 2, the occurrences of 'it' in the text, got 0",
        ),
        ([SENTENCE, "--out", "nowhere/step.html"], "cannot write nowhere/step.html: the folder"),
        ([SENTENCE, "--out", "a-folder.html"], "cannot write a-folder.html: it is a folder"),
        (["--example", "--target", "a"], "--example has its own text and head"),
        ([SENTENCE, "--without", "norm"], "without: expected scale, mask, position, shift, got 'norm'"),
        ([SENTENCE, "--out", "a.svg"], "--out a.svg: a page is written to an .html"),
        ([SENTENCE, "--model", "nowhere"], "nowhere: no such model folder"),
        ([SENTENCE, "--example"], "--example has its own text and head"),
        (["The", "cat"], 'put the text in quotes: saccade step "The cat"'),
        (["no-such-file.txt"], "no-such-file.txt: no such file"),
        (["word " * 300], "this model reads 255 tokens at once"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, tmp_path, arguments, said):
    (tmp_path / "a-folder.html").mkdir()
    assert said in refused(capsys, *arguments)
