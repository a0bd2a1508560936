"""What a file or an argument brings reaches a terminal without the characters that command it; data stays as it is."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
import unicodedata
from pathlib import Path

import pytest
import torch
import typer
from rich.text import Text
from safetensors.torch import load_file, save_file

import saccade
from saccade.cli import _app, main
from saccade.models import load, save
from saccade.support._terminal import cleaned_streams, printable, uncleaned
from saccade.support._terminal._console import Console

TITLE = "\033]0;PWNED\033\\"  # sets a terminal's title
EVIL = f"{TITLE}\x9b31m\x07\x7f\u202eabc\u2066"


def commands_in(text: str) -> set[str]:
    """By Unicode's categories and bidirectional classes, an oracle of its own."""
    overrides = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    return {
        c
        for c in text
        if (unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n") or unicodedata.bidirectional(c) in overrides
    }


@pytest.mark.slow
def test_every_command_is_replaced_and_nothing_else():
    for number in range(sys.maxunicode + 1):
        letter = chr(number)
        assert printable(letter) == ("\ufffd" if commands_in(letter) else letter), hex(number)
    assert printable("na\u00efve \U0001f469\u200d\U0001f52c \u05e9\u05dc\u05d5\u05dd\t\n") == (
        "na\u00efve \U0001f469\u200d\U0001f52c \u05e9\u05dc\u05d5\u05dd\t\n"
    )


@pytest.fixture
def told(capsys):
    """What a command leaves on its two streams, which must hold no commands."""

    def run(*arguments: str) -> str:
        main(arguments)
        written = "".join(capsys.readouterr())
        assert not commands_in(written), written
        return written

    return run


def test_a_text_its_next_commands_and_the_name_of_its_file(told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(f"{EVIL}.txt").write_text(f"{EVIL} hello there my friend", encoding="utf-8")
    written = told("look", f"{EVIL}.txt")
    assert "generate" in written and written.count("PWNED") >= 3
    assert "PWNED" in told("look", f"{EVIL} hello there", "--head", "1.2")


@pytest.mark.parametrize(
    "arguments",
    [
        ["look", f"{EVIL}.txt"],
        ["look", "--head", EVIL, "the cat"],
        ["look", "--model", f"./{EVIL}", "the cat"],
        ["generate", "--model", f"./{EVIL}", "the cat"],
        ["generate", "--sideways", EVIL, EVIL],
        [EVIL],
        ["verify", f"{EVIL}.py:f"],
        ["verify", "x.py:f", "--arg", f"{EVIL}=1"],
        ["verify", "x.py:f", "--only", EVIL],
        ["compare", "--mechanism", EVIL],
        ["bench", "--mask", EVIL],
        ["bench", "--from", EVIL],
        ["train", "lm", f"{EVIL}.txt"],
        ["look", b"\x9b31m.txt".decode("utf-8", "surrogateescape")],
    ],
)
def test_arguments_in_error_messages(told, arguments):
    assert told(*arguments).startswith("saccade: error: ")


def test_names_in_a_model_folder(told, tmp_path):
    save(load(), tmp_path / "own")
    weights = tmp_path / "own" / "model.safetensors"
    save_file({**load_file(weights), f"{EVIL}.weight": torch.zeros(2)}, weights)
    assert "PWNED" in told("look", "--model", str(tmp_path / "own"), "the cat")
    assert "PWNED" in told("generate", "--model", str(tmp_path / "own"), "the cat")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text(json.dumps({"model_type": EVIL}))
    assert "PWNED" in told("look", "--model", str(foreign), "the cat")


def test_json_and_files_stay_as_they_are(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["look", f"{EVIL} hello", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["text"] == f"{EVIL} hello"
    assert main(["generate", "abc\x7f", "--tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("abc\x7f")  # in a pipe a text is data


def test_a_generated_text_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["generate", f"{TITLE}the\x7f cat", "--tokens", "1"]) == 0
    assert not commands_in(capsys.readouterr().out)


def test_what_other_libraries_write_while_a_command_runs(capsys, monkeypatch):
    app = typer.Typer()

    @app.command()
    def loud() -> None:
        print(EVIL, file=sys.stderr)  # as warnings are written
        log = logging.Logger("loud")
        log.addHandler(logging.StreamHandler())
        log.warning(EVIL)
        print(EVIL)
        sys.stdout.writelines([EVIL])
        for text in ("\r 50 %", "\x1b[A\x1b[A", "\x1b[A\x1b[31m"):  # a bar, as tqdm draws it; and not one
            sys.stderr.write(text)

    monkeypatch.setattr(_app, "app", app)
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.count("PWNED") == 2 and not commands_in(out)
    assert err.count("PWNED") == 2 and err.endswith("\r 50 %\x1b[A\x1b[A\ufffd[A\ufffd[31m")
    assert not commands_in(err.removesuffix("\r 50 %\x1b[A\x1b[A\ufffd[A\ufffd[31m"))


def test_our_own_colours_and_links_stay():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="truecolor", width=80)
    console.print(Text.assemble((EVIL, "bold red link file:///a"), "\x1b[31m"))
    written = file.getvalue()
    assert written.startswith("\x1b]8;") and "\x1b[1;31m" in written
    assert "\ufffd]0;PWNED\ufffd\\" in written and "\ufffd[31m" in written
    console.print(f"{EVIL} plain", EVIL, style="dim")
    assert "\x1b]0;" not in file.getvalue() and "\x9b" not in file.getvalue()


def test_the_streams_come_back(capsys):
    outer = sys.stdout, sys.stderr
    with cleaned_streams():
        assert (uncleaned(sys.stdout), uncleaned(sys.stderr)) == outer
        with cleaned_streams():  # a command inside of a command
            assert uncleaned(sys.stdout) is outer[0]
    assert (sys.stdout, sys.stderr) == outer and uncleaned(sys.stdout) is sys.stdout


def test_no_other_console_is_made():
    for path in Path(saccade.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "Console" not in text:
            continue
        tree = ast.parse(text)
        theirs = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            and node.module == "rich.console"
            and any(alias.name == "Console" for alias in node.names)
        ]
        made = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Console"
        ]
        assert not (theirs and made), path
