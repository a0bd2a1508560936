"""`saccade embed`: what it reads and writes, and that interrupted work goes on to equal bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from published import transformers, written, written_words
from saccade import cli, models
from saccade.models import embedding
from saccade.models.embedding import Embedder

TEXTS = [f"{'the cat sat on the mat. ' * (n % 5)}{n}" for n in range(23)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny BERT with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    written_words(path, TEXTS)
    sizes = dict(vocab_size=97, hidden_size=14, num_hidden_layers=1, num_attention_heads=7, intermediate_size=13)
    written(path, "BertModel", transformers().BertConfig(**sizes))
    return path


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def told(capsys, *arguments, status=0) -> str:
    assert cli.main(["embed", *map(str, arguments)]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_lines_to_numbers(tmp_path, model, lines, capsys):
    out = tmp_path / "vectors.npy"
    assert told(capsys, lines, "--model", model, "--out", out) == f"23 vectors of 14 numbers  {out}\n"
    vectors = np.load(out)
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, models.embed(TEXTS, model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt", "vectors.npy"]


def test_options_reach_the_vectors(tmp_path, model, lines, capsys):
    out = tmp_path / "vectors.npy"
    told(capsys, lines, "--model", model, "--out", out, "--pooling", "max", "--normalize", "--tokens-per-batch", "30")
    expected = models.embed(TEXTS, model, pooling="max", normalize=True, tokens_per_batch=30)
    assert np.array_equal(np.load(out), expected)


def test_a_column_to_json_lines(tmp_path, model, capsys):
    table, out = tmp_path / "t.csv", tmp_path / "v.jsonl"
    table.write_text('id,said\n1,"the cat,\nthe mat"\n2,"“sat”"\n', encoding="utf-8")
    told(capsys, table, "--column", "said", "--model", model, "--out", out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["text"] for row in rows] == ["the cat,\nthe mat", "“sat”"]
    found = np.array([row["vector"] for row in rows], np.float32)
    assert np.array_equal(found, models.embed(["the cat,\nthe mat", "“sat”"], model))


@pytest.mark.slow
def test_a_long_cell(tmp_path, model, capsys):
    """Python's csv refuses cells of more than 128 KiB."""
    table, out = tmp_path / "t.csv", tmp_path / "v.npy"
    long = "the cat sat " * 20_000
    table.write_text(f"said\n{long}\nthe mat\n")
    told(capsys, table, "--column", "said", "--model", model, "--out", out)
    assert np.array_equal(np.load(out), models.embed([long, "the mat"], model))


def test_a_folder_is_a_text_a_file(tmp_path, model, capsys):
    folder, out = tmp_path / "texts", tmp_path / "v.jsonl"
    (folder / "more").mkdir(parents=True)
    (folder / "b.txt").write_text("the cat\nsat")
    (folder / "more" / "a.txt").write_text("the mat")
    (folder / "c.md").write_text("nothing")
    told(capsys, folder, "--model", model, "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["file"] for row in rows] == ["b.txt", "more/a.txt"]
    assert np.array_equal(np.array(rows[0]["vector"], np.float32), models.embed(["the cat\nsat", "the mat"], model)[0])


def test_empty_lines_keep_their_rows_and_are_told(tmp_path, model, capsys):
    lines, out = tmp_path / "texts.txt", tmp_path / "v.npy"
    lines.write_text("the cat\n\nthe mat\n \n")
    assert cli.main(["embed", str(lines), "--model", str(model), "--out", str(out)]) == 0
    assert "2 of the texts are empty" in capsys.readouterr().err
    assert np.array_equal(np.load(out), models.embed(["the cat", "", "the mat", " "], model))


@pytest.mark.parametrize("ending", ["npy", "jsonl"])
def test_interrupted_work_goes_on_to_equal_bytes(tmp_path, model, lines, capsys, monkeypatch, ending):
    monkeypatch.setattr(embedding, "CHUNK", 5)
    whole, out = tmp_path / f"whole.{ending}", tmp_path / f"out.{ending}"
    told(capsys, lines, "--model", model, "--out", whole)
    chunk, computed = Embedder.chunk, []

    def interrupted(self, texts, told=None):
        computed.extend(texts)
        if len(computed) > 12:
            raise KeyboardInterrupt
        return chunk(self, texts, told)

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "chunk", interrupted)
        told(capsys, lines, "--model", model, "--out", out, status=130)
    assert not out.exists()
    partial = tmp_path / f"out.{ending}.partial"
    with partial.open("ab") as file:
        file.write(bytes(2 * 4 * 14) + b"half a vec")  # as a kill while writing leaves it
    computed.clear()
    monkeypatch.setattr(Embedder, "chunk", lambda s, texts, told=None: computed.extend(texts) or chunk(s, texts, told))
    assert "23 vectors of 14 numbers, 10 of them from the run before" in told(
        capsys, lines, "--model", model, "--out", out
    )
    assert computed == TEXTS[10:]
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()


def test_work_of_another_run_is_not_continued(tmp_path, model, lines, capsys, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 5)
    monkeypatch.setattr("saccade.operator.nn._rounded.LARGE", 1)
    out = tmp_path / "out.npy"
    chunk = Embedder.chunk

    def second_fails(self, texts, told=None):
        if texts[0] != TEXTS[0]:
            raise KeyboardInterrupt
        return chunk(self, texts, told)

    with monkeypatch.context() as patch:
        patch.setattr(Embedder, "chunk", second_fails)
        told(capsys, lines, "--model", model, "--out", out, status=130)
    for option in (("--pooling", "max"), ("--weights", "int8")):
        err = told(capsys, lines, "--model", model, "--out", out, *option, status=2)
        assert "out.npy.partial: unfinished vectors of another run (other options); --force discards them" in err
    lines.write_text("\n".join(TEXTS[:-1]))
    err = told(capsys, lines, "--model", model, "--out", out, status=2)
    assert "(other texts)" in err
    assert "22 vectors" in told(capsys, lines, "--model", model, "--out", out, "--force")
    assert np.array_equal(np.load(out), models.embed(TEXTS[:-1], model))


@pytest.mark.slow
def test_a_killed_process_goes_on_to_equal_bytes(tmp_path, model):
    lines, texts = tmp_path / "texts.txt", [f"the cat sat on the mat {n}. " * 9 for n in range(12_000)]
    lines.write_text("\n".join(texts))
    out = tmp_path / "out.npy"
    command = [sys.executable, "-m", "saccade", "embed", lines, "--model", model, "--out"]
    child = subprocess.Popen([*command, out], env={**os.environ, "HF_HUB_OFFLINE": "1"})
    partial = tmp_path / "out.npy.partial"
    end = time.monotonic() + 100
    while (not partial.exists() or partial.stat().st_size < 4 * 14 * embedding.CHUNK) and time.monotonic() < end:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert partial.exists() and not out.exists()
    again = subprocess.run([*command, out], capture_output=True, text=True, check=True)
    assert "from the run before" in again.stdout
    subprocess.run([*command, tmp_path / "whole.npy"], check=True, capture_output=True)
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("t.txt", "", [], "t.txt: empty, expected at least one text"),
        ("t.csv", "id,said\n1,a\n", [], "t.csv: --column is missing; it has 'id', 'said'"),
        ("t.csv", "id,said\n1,a\n", ["--column", "text"], "t.csv: no column 'text'; it has 'id', 'said'"),
        ("t.csv", "id,said\n1\n", ["--column", "said"], "t.csv: line 2 has no 'said'"),
        ("t.csv", "id,said\n", ["--column", "said"], "t.csv: empty, expected at least one text"),
        ("t.txt", "a\n", ["--column", "said"], "--column said: only for a .csv or .tsv"),
        ("t.txt", b"\xff\xfe", [], "t.txt: not a text in UTF-8 (at byte 0)"),
        ("t.txt", "a\n", ["--out", "v.bin"], "--out v.bin: expected a name that ends in .npy or .jsonl"),
        ("t.txt", "a\n", ["--pooling", "sum"], "pooling: expected one of first, max"),
        ("t.txt", "a\n", ["--tokens-per-batch", "0"], "--tokens-per-batch: expected an int above 0, got 0"),
        ("t.txt", "a\n", ["--model", "nowhere"], "nowhere: no such model folder"),
        ("none.txt", None, [], "none.txt: no such file"),
    ],
)
def test_faults_are_one_line(tmp_path, model, monkeypatch, capsys, name, content, options, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    given = {"--model": str(model), "--out": "v.npy", **dict(zip(options[::2], options[1::2], strict=True))}
    err = told(capsys, name, *(word for pair in given.items() for word in pair), status=2)
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "v.npy").exists()


def test_an_existing_file_is_kept(tmp_path, model, lines, capsys):
    out = tmp_path / "v.npy"
    out.write_text("mine")
    assert "exists; --force replaces it" in told(capsys, lines, "--model", model, "--out", out, status=2)
    assert out.read_text() == "mine"
    told(capsys, lines, "--model", model, "--out", out, "--force")
    assert np.load(out).shape == (23, 14)
