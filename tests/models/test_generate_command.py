"""`saccade generate`, from the command line to what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.families import test_bert, test_gpt2, test_llama
from published import written
from saccade import cli
from saccade.models import Sampling, generate, load, save
from saccade.models.tokenizers.own import train_bpe


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


@pytest.mark.slow
def test_weights_of_few_bits_are_those_of_load(capsys):
    assert cli.main(["generate", "the cat", "--tokens", "9", "--seed", "3", "--weights", "int4"]) == 0
    wanted = "".join(generate(load(weights="int4"), "the cat", 9, Sampling(temperature=0.8, seed=3)))
    assert capsys.readouterr().out == f"the cat{wanted}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["the", "--weights", "int3"], "weights: expected None or one of 'bfloat16', 'int8', 'int4'"),
        (["\n" * 22], "prompt: 23 tokens with the start token; the model's context of 23 must hold them and at least"),
        (["a", "--tokens", 0], "tokens: must be at least 1, got 0"),
        (["a", "--temperature", -1], "temperature: must be finite and not negative, got -1.0"),
        (["a", "--top-k", 0], "--top-k: must be at least 1, got 0"),
        (["a", "--top-p", 2], "--top-p: must be in (0, 1], got 2.0"),
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


TEXT = "the cat sat on the mat. the dog sat on the cat's mat - dogs do.\n"


def published(folder: Path, name: str) -> Path:
    """A tiny checkpoint as transformers writes it, with a tokenizer of 280 tokens that begins texts with <s>."""
    make = test_gpt2 if name.startswith("GPT") else test_llama
    written(folder, name, make.config(name, vocab_size=280), spread=0.8)
    (folder / "tokenizer.json").write_text(train_bpe([TEXT * 3], 280).to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "model_max_length": 64}))
    return folder


# What a child process does to be sure that transformers is not asked.
ALONE = "import sys; sys.modules['transformers'] = None; from saccade import cli; sys.exit(cli.main(sys.argv[1:]))"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("GPT2LMHeadModel", "GPTNeoForCausalLM"))],
)
def test_published_decoders_alone(tmp_path, name):
    folder = published(tmp_path / "model", name)
    options = ["--tokens", "9", "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "generate", "the cat", "--model", folder, *options],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    model = load(folder)
    assert done.stdout == "the cat" + "".join(generate(model, "the cat", 9, Sampling(temperature=0.0))) + "\n"
    ids = model.tokenizer.encode("the cat").ids
    written_ids = model.generate(torch.tensor([[*model.tokenizer.before, *ids]]), max_new_tokens=9)[0]
    assert done.stdout.strip() == model.tokenizer.decode(written_ids).strip()


def test_repeated_tokens_are_penalised_as_the_files_say(tmp_path, capsys):
    folder = published(tmp_path / "model", "LlamaForCausalLM")
    said = []
    for penalty in (1.0, 0.3):
        (folder / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty, "do_sample": True}))
        assert cli.main(["generate", "the cat", "--model", str(folder), "--tokens", "9", "--temperature", "0"]) == 0
        said.append(capsys.readouterr().out)
        likeliest = Sampling(temperature=0.0, repetition_penalty=penalty)
        assert said[-1] == "the cat" + "".join(generate(load(folder), "the cat", 9, likeliest)) + "\n"
    assert said[0] != said[1]


def test_what_continues_no_text_is_refused(tmp_path, capsys):
    written(tmp_path / "bert", "BertModel", test_bert.config())
    assert cli.main(["generate", "a", "--model", str(tmp_path / "bert")]) == 2
    assert "is BERT, which does not generate text; expected a decoder" in capsys.readouterr().err
    folder = published(tmp_path / "gpt2", "GPT2Model")
    assert cli.main(["generate", "a", "--model", str(folder)]) == 2
    assert "generate: needs the head 'causal-lm', and this model has none" in capsys.readouterr().err
    published(tmp_path / "llama", "LlamaForCausalLM")
    (tmp_path / "llama" / "tokenizer.json").unlink()
    assert cli.main(["generate", "a", "--model", str(tmp_path / "llama")]) == 2
    assert "tokenizer" in capsys.readouterr().err
