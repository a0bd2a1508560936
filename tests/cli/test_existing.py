"""Missing files on a command line are found before PyTorch is imported, in every command."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer

from saccade import cli
from saccade.cli import _app
from saccade.cli._run import run

MISSING = {
    "look gone.txt": "TEXT gone.txt: no such file",
    "look the --model ./gone": "--model ./gone: no such model folder; expected a folder with config.json",
    "look --corpus gone.txt": "--corpus gone.txt: no such file or folder",
    "heads the --patch gone.txt": "--patch gone.txt: no such file; expected a text in quotes, or a text file",
    "view gone.txt": "TEXT_OR_FILE gone.txt: no such file",
    "train lm gone.txt": "TEXT gone.txt: no such file or folder; expected a text file, or a folder of .txt files",
    "train lm here.txt --hold-out here.txt --hold-out gone.txt": "--hold-out gone.txt: no such file or folder",
    "train lm here.txt --from org/gone": "--from org/gone: no such model folder",
    "train classify gone.csv --out o": "DATA gone.csv: no such file or folder; expected a .csv, .tsv or .jsonl, or a",
    "train classify here.txt --out o --from gone": "--from gone: no such model folder",
    "test gone here.txt": "RUN gone: no such folder; expected the folder of a run, as written by `saccade train --out`",
    "predict . gone.csv": "INPUT gone.csv: no such file or folder",
    "embed hear.txt --model . --out o.npy": "FILE_OR_FOLDER hear.txt: no such file or folder (did you mean here.txt?)",
    "prune gone --keep .5": "MODEL gone: no such model folder",
    "distill . layers=1 gone.csv --out o": "DATA gone.csv: no such file or folder",
    "verify gone.py:Attention": "TARGET gone.py:Attention: no such file or folder; expected path/to/file.py:NAME",
    "verify hf:gone": "TARGET hf:gone: no such file or folder",
    "verify here.txt --adapter gone.py:call": "--adapter gone.py:call: no such file; expected FILE.py:NAME",
    "compare --tensors gone.pt": "--tensors gone.pt: no such file; expected a .safetensors or .pt file",
    "bench --from gone.json": "--from gone.json: no such file",
}
SCRIPT = """
import contextlib, io, json, sys
from saccade import cli

said = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        status = cli.main(words.split())
    said.append([status, told.getvalue()])
print(json.dumps([said, "torch" in sys.modules]))
"""


def test_a_missing_file_is_one_line_without_pytorch(tmp_path):
    (tmp_path / "here.txt").write_text("the cat")
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(MISSING))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    said, computes = json.loads(done.stdout)
    for (words, expected), (status, line) in zip(MISSING.items(), said, strict=True):
        assert status == 2, words
        assert line.startswith(f"saccade: error: {expected}") and line.count("\n") == 1, line
    assert not computes


# What a command writes.
NOT_READ = {"out", "markdown", "plot", "junit", "records", "folder", "picture"}


def options(app, words=()):
    """The words of each command, the name of each of its parameters, its type, and what typer knows of it."""
    for group in app.registered_groups:
        yield from options(group.typer_instance, (*words, group.name))
    for command in app.registered_commands:
        for one in inspect.signature(command.callback, eval_str=True).parameters.values():
            kind, *info = typing.get_args(one.annotation) or [one.annotation]
            yield " ".join([*words, command.name, one.name]), one.name, str(kind), info[0] if info else None


def test_every_option_that_names_a_file_is_looked_at():
    """A new command cannot forget it: `diagram --model` alone also takes names of architectures."""
    unchecked = set()
    for words, name, kind, info in options(_app.app):
        metavar = getattr(info, "metavar", None)
        names_a_file = "Path" in kind or metavar in ("DIR_OR_HUB_ID", "TEXT_OR_FILE", "FILE_OR_TEXT", "RUN", "TARGET")
        if names_a_file and getattr(info, "callback", None) is None and name not in NOT_READ:
            unchecked.add(words)
    assert unchecked == {"diagram model"}


@pytest.mark.parametrize("prefix", ["pairs", "pairs.de"])
def test_data_may_be_what_two_names_begin_with(prefix, tmp_path, monkeypatch):
    """The data of `translate`, of which two files exist and none has that name alone."""
    monkeypatch.chdir(tmp_path)
    for language in ("de", "en"):
        Path(f"pairs.{language}").write_text("ja\n")
    app, seen = typer.Typer(), []
    checked = typer.Argument(callback=cli._parts._existing.existing_data())
    app.command()(lambda data=checked: seen.append(data))
    assert run([prefix], app) == 0
    assert seen == [prefix]


def test_what_several_words_lack_is_quotes(capsys):
    assert cli.main(["look", "the", "cat.txt"]) == 2
    assert 'put the text in quotes: saccade look "the cat.txt"' in capsys.readouterr().err
