"""`saccade generate`, from the command line to what it prints."""

from __future__ import annotations

import pytest

from saccade import cli
from saccade.models import save


@pytest.fixture
def write(lm, tmp_path):
    save(lm, tmp_path / "model")
    return lambda *arguments: cli.main(["generate", "--model", str(tmp_path / "model"), *map(str, arguments)])


def test_continues_the_prompt(write, capsys):
    assert write("the cat", "--tokens", 9, "--seed", 3) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    assert len(first) > len("the cat\n")
    write("the cat", "--tokens", 9, "--seed", 3)
    assert capsys.readouterr().out == first
    write("the cat", "--tokens", 9, "--seed", 4)
    assert capsys.readouterr().out != first


def test_the_likeliest_is_the_likeliest_however_it_is_asked_for(write, capsys):
    outs = []
    for options in (("--temperature", 0), ("--top-k", 1), ("--top-p", 1e-6)):
        assert write("the", "--tokens", 7, *options) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] == outs[2]


def test_streams_piece_by_piece(write, monkeypatch):
    pieces = []
    monkeypatch.setattr("typer.echo", lambda text="", **how: pieces.append(text))
    write("the", "--tokens", 18, "--seed", 2)
    assert len(pieces) > 6


def test_an_empty_prompt_begins_a_text(write, capsys):
    assert write("", "--tokens", 5, "--seed", 1) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["\n" * 22], "prompt: 23 tokens with the start token; the model's context of 23 must hold them and at least"),
        (["a", "--tokens", 0], "tokens: must be at least 1, got 0"),
        (["a", "--temperature", -1], "temperature: must be finite and not negative, got -1.0"),
        (["a", "--top-k", 0], "top_k: must be at least 1, got 0"),
        (["a", "--top-p", 2], "top_p: must be in (0, 1], got 2.0"),
        (["a", "--model", "/nowhere"], "/nowhere: no such model folder"),
        (["a", "--louder"], "--louder"),
    ],
)
def test_bad_input_is_one_line(write, capsys, arguments, message):
    assert write(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("saccade: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_damaged_model_is_named(write, tmp_path, capsys):
    (tmp_path / "model" / "model.safetensors").write_bytes(b"junk")
    assert write("a") == 2
    assert "model.safetensors: damaged" in capsys.readouterr().err
