"""Studies of many texts in `saccade look`: what is printed, written, and refused."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re

import pytest
from test_treebank import DONT, line

from saccade import cli
from saccade.cli import _errors

PROSE = (
    """It was a dark night, and the old man sat by the fire. The dog slept; the cat did not.
"Who is there?" said the old man. Nobody said a word, and the dog slept.
"""
    * 6
)
LABELS = "".join(f"the\tD\n{word}\tN\nsat\tV\n\n" for word in "cat dog man bird fox hen king queen".split())
COREF = {"text": "Ann met Bob. She left.", "clusters": [[[0, 3], [13, 16]]]}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    (tmp_path / "one.txt").write_text(PROSE)
    (tmp_path / "two.txt").write_text(PROSE.replace("old", "young").replace("dog", "horse"))
    (tmp_path / "bank.conllu").write_text("\n".join(DONT) + "\n")
    (tmp_path / "labels.tsv").write_text(LABELS)
    (tmp_path / "coref.jsonl").write_text(json.dumps(COREF) + "\n")


def run(capsys, *arguments):
    status = cli.main(["look", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("saccade: error: ") and err.count("\n") == 1
    return err


def told(capsys, *arguments):
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    return out


def numbers(capsys, *arguments):
    return json.loads(told(capsys, *arguments, "--json"))


@pytest.mark.slow
def test_a_corpus(capsys):
    out = told(capsys, "--corpus", "one.txt", "--tokens", 64)
    assert out.startswith("embedded: 4 layers, 32 heads, on ")
    assert max(map(len, out.splitlines())) <= 80
    assert "Roles of the heads" in out
    assert re.search(r"^repeat induction +\.0\d ", out, re.MULTILINE)


@pytest.mark.slow
def test_several_files_with_or_without_a_shells_help(capsys):
    named = numbers(capsys, "--corpus", "one.txt", "--corpus", "two.txt", "--tokens", 64)
    shell = numbers(capsys, "--corpus", "one.txt", "two.txt", "--tokens", 64)
    assert named == shell
    files = {text["name"].partition(":")[0] for text in named["corpus"]["texts"]}
    assert files == {"one.txt", "two.txt"}
    assert set(named) == {"format", "corpus"}
    assert len(named["corpus"]["heads"]) == 32


@pytest.mark.slow
def test_the_same_command_gives_the_same_numbers(capsys):
    command = ("--corpus", "one.txt", "--tokens", 64, "--texts", 3, "--seed", 5)
    once = numbers(capsys, *command)
    assert once == numbers(capsys, *command)
    other = numbers(capsys, *command[:-1], 6)
    assert other["corpus"]["texts"] == once["corpus"]["texts"]
    assert other != once


@pytest.mark.slow
def test_two_checkpoints(capsys, tmp_path):
    from checkpoints import llama

    folder = llama(tmp_path / "llama", context=128)
    found = numbers(capsys, "--corpus", "one.txt", "--against", folder, "--texts", 2)
    assert set(found) == {"format", "corpus", "against", "comparison"}
    assert found["comparison"]["by_head"] is False and found["comparison"]["changes"] == []
    assert found["corpus"]["texts"][0]["name"] == found["against"]["texts"][0]["name"]
    assert max(text["tokens"] for text in found["against"]["texts"]) <= 127
    out = told(capsys, "--corpus", "one.txt", "--against", folder, "--texts", 2)
    assert f"embedded -> {folder}" in out.replace("\n", " ") or str(folder)[:40] in out


@pytest.mark.slow
def test_a_treebank_coreference_and_labels(capsys):
    out = told(capsys, "--syntax", "bank.conllu", "--coreference", "coref.jsonl", "--probe", "labels.tsv")
    at = [out.index(f"embedded: {part}") for part in ("relations", "antecedents", "linear probes")]
    assert at == sorted(at)
    found = numbers(capsys, "--syntax", "bank.conllu", "--coreference", "coref.jsonl", "--probe", "labels.tsv")
    assert set(found) == {"format", "syntax", "coreference", "probe"}
    assert found["syntax"]["sentences"] == 1 and found["coreference"]["kinds"][0]["cases"] == 1
    assert [layer["layer"] for layer in found["probe"]["layers"]] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_a_column_of_a_treebank(capsys, tmp_path):
    (tmp_path / "two.conllu").write_text(("\n".join(DONT) + "\n") * 2)
    assert numbers(capsys, "--probe", "two.conllu")["probe"]["labels"][:2] == ["ADV", "AUX"]
    assert "root" in numbers(capsys, "--probe", "two.conllu", "--column", "deprel")["probe"]["labels"]


@pytest.mark.slow
def test_numbers_in_a_file(capsys, tmp_path):
    out = told(capsys, "--corpus", "one.txt", "--syntax", "bank.conllu", "--texts", 1, "--out", "all.csv")
    assert out.rstrip().endswith("Numbers  all.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "all.csv").read_text())))
    assert {row["study"] for row in rows} == {"corpus", "syntax"}
    previous = next(r for r in rows if (r["score"], r["layer"], r["head"]) == ("previous", "0", "4"))
    assert float(previous["value"]) > 0.8 and previous["count"] == "1" and previous["deviation"] == ""
    told(capsys, "--corpus", "one.txt", "--texts", 1, "--out", "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["corpus"]["model"] == "embedded"
    told(capsys, "--probe", "labels.tsv", "--out", "probe.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "probe.csv").read_text())))
    assert [(r["study"], r["layer"]) for r in rows if r["score"] == "accuracy"] == [("probe", str(i)) for i in range(5)]
    assert "all.csv exists and was not made by Saccade" in refused(capsys, "--corpus", "one.txt", "--out", "all.csv")
    told(capsys, "--corpus", "one.txt", "--texts", 1, "--out", "all.csv", "--force")
    assert not list(tmp_path.glob(".all*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--corpus", "none.txt"], "none.txt: no such file"),
        (["--syntax", "none.conllu"], "none.conllu: no such file"),
        (["--syntax", "one.txt"], "one.txt:1: not CoNLL-U: 1 column between tabs, expected 10"),
        (["--syntax", "bank.conllu", "A text."], "a study reads files, not a TEXT; 'A text.' came"),
        (["--against", "org/x"], "--against compares two checkpoints over texts; name them with --corpus"),
        (["--seed", "3"], "nothing to study came; name it with --corpus, --syntax, --coreference or --probe"),
        (["--corpus", "one.txt", "--texts", "0"], "--texts 0: at least 1 is needed"),
        (["--corpus", "one.txt", "--tokens", "2"], "corpus: none of the"),
        (["--corpus", "one.txt", "--out", "x.html"], "--out x.html: the numbers of a study are written to a .csv or"),
        (["--corpus", "one.txt", "--head", "2.1"], "a look at one TEXT"),
        (["--probe", "one.txt"], "one.txt:1: expected a word, a tab and a label"),
        (["--probe", "bank.conllu"], "bank.conllu: expected two or more sentences"),
        (["--probe", "bank.conllu", "--column", "xpos"], "column: expected upos or deprel, got 'xpos'"),
        (["--coreference", "labels.tsv"], "labels.tsv:1: not JSON"),
        (["--corpus", "one.txt", "--model", "nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, arguments, words):
    assert words in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("conllu", ["--syntax", "bank.conllu"]),
        ("conllu", ["--probe", "bank.conllu"]),
        ("sklearn", ["--probe", "labels.tsv"]),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(capsys, monkeypatch, module, arguments):
    find = importlib.util.find_spec
    monkeypatch.setattr(_errors.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    expected = f'saccade look needs {module}, which is not installed: pip install "conllu>=6.0"'
    assert expected in refused(capsys, *arguments)


def test_a_corpus_needs_no_extras(capsys, monkeypatch):
    find = importlib.util.find_spec
    gone = ("conllu", "sklearn", "transformers")
    monkeypatch.setattr(_errors.importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    assert told(capsys, "--corpus", "one.txt", "--texts", 1)


def test_a_treebank_may_be_of_words_without_relations(capsys, tmp_path):
    (tmp_path / "flat.conllu").write_text("\n".join([line(1, "a"), line(2, "b"), ""]))
    assert "flat.conllu: no relation that embedded can answer" in refused(capsys, "--syntax", "flat.conllu")
