"""Help with examples that the commands themselves can read, shell completion, and what a terminal sees meanwhile."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from saccade.analysis.tables import shown_progress
from saccade.cli import _app, main
from saccade.cli._parts._examples import EXAMPLES
from saccade.support._terminal import _console, standard_input
from saccade.support._terminal._waiting import WaitingLine
from slowly import slow_but

ESCAPE = "\x1b"


def every_command() -> Iterator[tuple[str, Any, Any]]:
    """Name, command and context, of sub-commands too ("train lm")."""
    group: Any = typer.main.get_command(_app.app)
    above = group.make_context("saccade", [], resilient_parsing=True)
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        context = type(above)(command, info_name=name, parent=above)
        if not hasattr(command, "list_commands"):
            yield name, command, context
            continue
        for below in command.list_commands(context):
            yield f"{name} {below}", command.get_command(context, below), context


def test_every_command_has_examples_that_its_parser_takes(monkeypatch):
    monkeypatch.setattr("saccade.cli._parts._existing._is_missing", lambda *_: False)  # files of the reader's
    commands = {name: (command, context) for name, command, context in every_command()}
    assert commands.keys() == EXAMPLES.keys()
    for name, examples in EXAMPLES.items():
        command, context = commands[name]
        for line in examples:
            assert len(line) <= 78, f"wider than a terminal: {line}"
            words = shlex.split(line)
            assert words[: 1 + name.count(" ") + 1] == ["saccade", *name.split()]
            arguments = words[2 + name.count(" ") :]
            arguments = arguments[: arguments.index(">")] if ">" in arguments else arguments
            command.make_context(name.split()[-1], arguments, parent=context.parent)  # raises a usage error


@pytest.mark.parametrize("name", ["", "train", *EXAMPLES])
def test_help_ends_with_examples(name, capsys):
    assert main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Examples:\n  saccade {name}".rstrip() in shown
    assert ESCAPE not in shown


COMPLETED = {
    "saccade ver": {"verify"},
    "saccade train cl": {"classify"},
    "saccade train classify --lab": {"--label", "--label-smoothing"},
    "saccade verify --form c": {"cross"},
    "saccade diagram multi": {"multi-head"},
    "saccade view my-no": set(),  # the shell completes files itself
}
COMPLETING = """
import os, sys
from saccade.cli import main
asked, sys.argv = sys.argv[1:], ["saccade"]
os.environ["_SACCADE_COMPLETE"] = "complete_bash"
for words in asked:
    os.environ.update(COMP_WORDS=words, COMP_CWORD=str(words.count(" ")))
    try:
        main()
    except SystemExit:  # as the completion ends
        pass
    print("|")
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_completion_of_bash():
    done = subprocess.run([sys.executable, "-c", COMPLETING, *COMPLETED], capture_output=True, text=True, check=False)
    found = [set(words.split()) for words in done.stdout.split("|")]
    assert (found, done.stderr) == ([*COMPLETED.values(), set()], "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> _Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return _Terminal()


def test_a_line_counts_seconds_until_something_is_shown(terminal):
    line = WaitingLine(terminal, begin=0.01)
    deadline = time.monotonic() + 30
    while not terminal.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    line.end()
    shown = terminal.getvalue()
    assert shown.startswith("\rworking, 0 s") and ESCAPE not in shown
    blank = shown.rpartition("\r")[0].rpartition("\r")[2]
    assert blank and not blank.strip() and shown.endswith("\r")
    time.sleep(0.05)
    assert terminal.getvalue() == shown


def test_no_line_where_output_is_piped():
    piped = io.StringIO()
    line = WaitingLine(piped, begin=0.001)
    time.sleep(0.05)
    line.end()
    assert piped.getvalue() == ""


def test_in_a_pipe_progress_is_a_few_plain_lines(monkeypatch):
    """`heads --patch` printed nothing for minutes where standard error is no terminal."""
    now, piped = [100.0], io.StringIO()
    monkeypatch.setattr(_console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", piped)
    for quiet in (False, True):
        with shown_progress("heads", quiet=quiet) as told:
            for done in range(1, 98):
                now[0] += 1.0
                told(done, 97)
    told_at = [(10, "10"), (20, "20"), (40, "40"), (80, "80")]
    assert piped.getvalue().splitlines() == [f"saccade: heads: {done} of 97, {s} s" for done, s in told_at]


@pytest.mark.parametrize(
    "shown", slow_but(["a message", "a result", "an error", "what a user types"], "a result", "an error")
)
def test_the_line_is_gone_before_other_output(shown, terminal, monkeypatch):
    monkeypatch.setattr("saccade.support._terminal._waiting.BEGIN", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stdin", io.StringIO("typed"))
    app = typer.Typer()

    @app.command()
    def wait() -> None:
        time.sleep(0.3)
        if shown == "a message":
            typer.echo("done", err=True)
        elif shown == "a result":
            from saccade.cli._parts._outputs import result_console

            result_console().print("done")
        elif shown == "an error":
            raise ValueError("done")
        else:
            typer.echo(f"{standard_input().read()} done")
        time.sleep(0.1)

    from saccade.cli._run import run

    run([], app)
    before, _, after = terminal.getvalue().partition("done")
    assert "working, 0 s" in before and "working" not in after
    last = before.rpartition("\r")[2]
    assert last.strip() in ("", "saccade: error:", "typed")
