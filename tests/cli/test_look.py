"""`saccade look`, from the command line to the files it writes."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

import saccade
from saccade import cli
from saccade.inspection import measure_roles
from saccade.models import DecoderLM, LanguageModel, ModelConfig, load, save
from saccade.models.tokenizers.own import train_bpe, train_characters
from slowly import slow_after

SENTENCE = "The cat sat on the mat, and the dog sat on the cat."
NAMES = ["hen", "fox", "owl", "bee", "cat", "dog", "elk", "man", "rat", "cow", "eel"]
STORY = " ".join(
    f"Once the {NAMES[i % 11]} met the {NAMES[3 * i % 11]}, and the {NAMES[5 * i % 11]} sat." for i in range(35)
)


def make_model(folder, tokenizer):
    torch.manual_seed(5)
    config = ModelConfig(vocabulary=tokenizer.vocabulary, width=40, layers=2, heads=5, kv_heads=1, context=71)
    lm = LanguageModel(DecoderLM(config), tokenizer)
    lm.heads = measure_roles(lm, STORY)
    save(lm, folder)
    return folder


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "bpe", train_bpe([STORY, SENTENCE], 320))


@pytest.fixture(scope="session")
def characters(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "my model", train_characters([STORY]))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    standard_input(monkeypatch, b"")


def standard_input(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def run(capsys, *arguments):
    status = cli.main(["look", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("saccade: error: ") and err.count("\n") == 1
    return err


def test_sentences_map_table_report_and_three_commands(bpe, capsys, tmp_path):
    status, out, err = run(capsys, SENTENCE, "--model", bpe)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    order = [
        out.index(part)
        for part in (
            "\u2022 ",
            "each row: what that word looks at",
            "Role of each head",
            "Report  saccade-report.html",
        )
    ]
    assert order == sorted(order)
    assert (tmp_path / "saccade-report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    commands = [shlex.split(line[8:]) for line in out.splitlines()[-3:]]
    assert [c[:2] for c in commands] == [["saccade", "look"], ["saccade", "look"], ["saccade", "generate"]]


@pytest.mark.parametrize("text", slow_after(2, ['It\'s $5 "now"!', "-dash first", "a `b` \\ c", "plain", "two\nlines"]))
def test_the_commands_to_try_work_as_printed(characters, capsys, text):
    _, out, _ = run(capsys, "--model", characters, "--", text)
    words = shlex.split(out[out.index("Next  ") + 4 :])
    starts = [i for i, word in enumerate(words) if word == "saccade"]
    first, second, third = (words[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True))
    assert first[-1] == second[-1] == text and first[3] == str(characters)
    assert cli.main(first[1:]) == 0
    assert third[1] == "generate" and text.split()[0].rstrip("!") in third[-1]
    assert capsys.readouterr().err == ""


def test_a_file_is_read_and_named(bpe, capsys, tmp_path):
    (tmp_path / "cat.txt").write_bytes(b"\xef\xbb\xbf" + SENTENCE.replace(" and", "\r\nand").encode() + b"\n")
    _, out, _ = run(capsys, "cat.txt", "--model", bpe)
    assert "from file cat.txt" in out and out.splitlines()[-3].endswith(" cat.txt")
    assert "from file cat.txt" in (tmp_path / "saccade-report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_standard_input(bpe, capsys, monkeypatch, arguments):
    standard_input(monkeypatch, SENTENCE.encode() + b"\n")
    _, out, _ = run(capsys, *arguments, "--model", bpe, "--json")
    numbers = json.loads(out)
    assert numbers["text"] == SENTENCE and numbers["source"] == "from standard input"


def test_json_is_all_there_is_and_the_report_is_written(bpe, capsys, tmp_path):
    status, out, err = run(capsys, SENTENCE, "--model", bpe, "--json", "--out", "a.html")
    numbers = json.loads(out)
    assert (status, err, numbers["report"]) == (0, "", "a.html")
    assert len(numbers["heads"]) == 10 and all(abs(sum(h["weights"][-1]) - 1) < 1e-4 for h in numbers["heads"])
    assert (tmp_path / "a.html").exists() and not (tmp_path / "saccade-report.html").exists()


def test_a_model_of_unequal_layers_has_its_heads_counted(bpe, capsys):
    """Would catch the heads of the largest layer told as those of all."""
    lm = load(bpe)
    lm.save("whole")  # short names: a long one is broken within the sentence
    assert "2 layers x 5 heads" in run(capsys, SENTENCE, "--model", "whole")[1]
    saccade.prune(lm, "0.0,0.1")
    lm.save("pruned")
    assert "8 heads in 2 layers" in run(capsys, SENTENCE, "--model", "pruned")[1]


def test_a_chosen_head(bpe, capsys):
    _, out, _ = run(capsys, SENTENCE, "--model", bpe, "--head", "1.3")
    assert "Layer 1 head 3" in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map.png", "map.SVG"])
def test_a_figure_for_a_paper_and_the_report(bpe, capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    _, out, _ = run(capsys, SENTENCE, "--model", bpe, "--out", name)
    assert f"Figure  {name}" in out
    assert (tmp_path / name).stat().st_size > 1000 and (tmp_path / "saccade-report.html").exists()


def test_a_figure_without_matplotlib_is_one_line(bpe, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert 'pip install "matplotlib>=3.9"' in refused(capsys, SENTENCE, "--model", bpe, "--out", "map.svg")
    assert list(tmp_path.iterdir()) == []


def test_part_of_a_text(bpe, capsys):
    _, out, _ = run(capsys, STORY, "--model", bpe, "--from", "3", "--to", "9", "--json")
    numbers = json.loads(out)
    assert [w["text"] for w in numbers["words"]] == ["<s>", *re.findall(r"\w+|,", STORY)[2:9]]
    assert "words 3 to 9 of " in numbers["source"]
    for wrong in (("--from", 9, "--to", 3), ("--from", 5000)):
        assert "no such words" in refused(capsys, STORY, "--model", bpe, *wrong)
    for wrong in (("--from", 0), ("--to", -1)):
        assert f"{wrong[0]} {wrong[1]}: words are counted from 1" in refused(capsys, STORY, "--model", bpe, *wrong)


@pytest.mark.slow
def test_too_long_a_text_says_what_fits_and_that_fits(bpe, capsys):
    for extra in ([], ["--from", "11"]):
        told = refused(capsys, STORY, "--model", bpe, *extra)
        assert "70 tokens (words or pieces of words) at once" in told and "--model" in told
        part = re.search(r"with (--.*), or ", told)[1].split()
        assert run(capsys, STORY, "--model", bpe, *part)[0] == 0
    assert "its first word alone has more" in refused(capsys, "a" * 7 + "bcdefgh" * 90, "--model", bpe)


@pytest.mark.slow
def test_a_text_without_blanks_has_words_and_is_read_as_far_as_the_model_holds_it(capsys, tmp_path):
    """A Thai passage was one word, and one of 90 letters an error about its first word."""
    thai = "\u0e40\u0e17\u0e28\u0e23\u0e31\u0e01" * 15
    status, out, _ = run(capsys, thai)
    said = " ".join(out.split())
    assert status == 0 and said.startswith("Note: this tokenizer cuts a word of this text into 4.5 tokens on average")
    assert "56 words and marks, 252 tokens" in said and "words 1 to 56 of 60" in said and "--from 1 --to 56" in said
    assert "score above chance when measured on tokens" in said
    assert '<p class="note">Note: this tokenizer' in (tmp_path / "saccade-report.html").read_text(encoding="utf-8")
    assert "read these with --to 56" in refused(capsys, thai, "--from", "1")


@pytest.mark.slow
def test_wrong_texts(bpe, capsys, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "data.bin").write_bytes(b"ab\0cd")
    for arguments, told in [
        ([""], "the text is empty"),
        (["  "], "the text is empty"),
        (["empty.txt"], "empty.txt is empty"),
        (["latin.txt"], "latin.txt: not a text in UTF-8 (byte 0xe9 at position 3)"),
        (["data.bin"], "data.bin: a binary file"),
        (["missing.txt"], "missing.txt: no such file"),
        (["./missing"], "./missing: no such file"),
        ([tmp_path], "is a folder"),
        (["/dev/null"], "/dev/null: not an ordinary file"),
        (["The", "cat"], 'put the text in quotes: saccade look "The cat"'),
        (["-", "The cat"], "both a text and - for standard input are given"),
        ([], "standard input is empty"),
        (["\udcff"], "not valid UTF-8"),
    ]:
        assert told in refused(capsys, "--model", bpe, "--", *arguments)
    monkeypatch.setattr(sys, "stdin", None)
    assert "no text is given" in refused(capsys, "--model", bpe)
    assert not (tmp_path / "saccade-report.html").exists()


def test_wrong_heads_models_and_options(bpe, capsys, tmp_path):
    assert "--head x: expected layer.head, such as 2.5" in refused(capsys, SENTENCE, "--head", "x")
    assert "9.0 does not exist" in refused(capsys, SENTENCE, "--model", bpe, "--head", "9.0")
    assert "no such model folder" in refused(capsys, SENTENCE, "--model", "nowhere")
    assert "--sideways" in refused(capsys, SENTENCE, "--sideways")
    broken = tmp_path / "broken"
    save(load(bpe), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors: damaged" in refused(capsys, SENTENCE, "--model", broken)
    assert not (tmp_path / "saccade-report.html").exists()


@pytest.mark.slow
def test_damaged_roles_are_left_out_with_a_note(bpe, capsys, tmp_path):
    broken = tmp_path / "broken"
    save(load(bpe), broken)
    rule = '{"heads": [], "rules": [{"roles": ["dreamer"], "at_least": 0.4, "measured_on": "text"}]}'
    for heads in ('{"heads": [1]}', "[1]", rule, rule.replace("dreamer", "self").replace("0.4", "NaN")):
        (broken / "heads.json").write_text(heads)
        status, out, _ = run(capsys, SENTENCE, "--model", broken)
        unwrapped = " ".join(out.split())  # paths are as long as the folder of the test
        assert status == 0 and "heads.json: damaged" in unwrapped and "roles were not measured" in unwrapped


def test_a_model_whose_heads_were_never_measured(bpe, capsys, tmp_path):
    lm = load(bpe)
    lm.heads = None
    save(lm, tmp_path / "plain")
    status, out, _ = run(capsys, SENTENCE, "--model", tmp_path / "plain")
    assert status == 0 and "roles were not measured" in out


def test_outputs_are_checked_before_the_model_is_read(capsys, tmp_path):
    (tmp_path / "notes.html").write_text("mine")
    assert "notes.html exists and was not made by Saccade" in refused(
        capsys, SENTENCE, "--out", "notes.html", "--model", "org/no"
    )
    assert "does not exist" in refused(capsys, SENTENCE, "--out", "no/report.html", "--model", "org/no")
    assert "it is a folder" in refused(capsys, SENTENCE, "--out", tmp_path, "--model", "org/no")
    assert (tmp_path / "notes.html").read_text() == "mine"


def test_force_and_a_second_report(bpe, capsys, tmp_path):
    (tmp_path / "saccade-report.html").write_text("mine")
    refused(capsys, SENTENCE, "--model", bpe)
    assert run(capsys, SENTENCE, "--model", bpe, "--force")[0] == 0
    assert run(capsys, "Another day.", "--model", bpe)[0] == 0
    assert "Another" in (tmp_path / "saccade-report.html").read_text(encoding="utf-8")


def test_a_stream_without_unicode_still_works(bpe, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["look", "na\u00efve cat", "--model", str(bpe)]) == 0
    sys.stdout.flush()
    assert b"na?ve" in written.getvalue()


@pytest.mark.slow
def test_a_pipe_without_unicode_still_works(bpe, tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-m", "saccade", "look", "na\u00efve cat", "--model", str(bpe)],
        cwd=tmp_path,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert b"na?ve" in done.stdout
