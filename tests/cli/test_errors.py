"""Whatever a user may do wrong at the command line is one line on stderr and exit status 2."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shlex
import subprocess
import sys

import pytest
import typer

from saccade import __version__, cli
from saccade.cli import _app
from saccade.cli._errors import UserError, naming_options, one_line, require
from saccade.make._task_registry import TASK_OPTIONS
from saccade.support._extras import NotInstalled, installing
from slowly import slow_after


@pytest.fixture
def broken_command(monkeypatch):
    """`saccade broken`, which raises what it is given."""
    app = typer.Typer()
    raised: list[BaseException] = []

    @app.callback()
    def shell() -> None: ...

    @app.command()
    def broken() -> None:
        raise raised[0]

    monkeypatch.setattr(_app, "app", app)
    monkeypatch.delenv("SACCADE_TRACEBACK", raising=False)
    return raised.append


def one_error_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("saccade: error: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sideways"], "--sideways"),
        (["gaze"], "gaze"),
        (["train", "lm", "--sideways"], "--sideways"),
        (["train", "lm"], "Missing argument"),
        (["train", "cnn"], "cnn"),
        (["generate"], "Missing argument"),
        (["generate", "once", "--tokens", "many"], "--tokens"),
        (["generate", "once", "upon"], "upon"),
    ],
)
def test_wrong_usage_is_one_line_that_names_it(arguments, told, capsys):
    assert cli.main(arguments) == 2
    line = one_error_line(capsys)
    assert told in line
    assert "--help)" in line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("there is no such head"), "there is no such head"),
        (ValueError("key: 3 rows\n  but 5 expected"), "key: 3 rows but 5 expected"),
        (TypeError("mask: a float tensor"), "mask: a float tensor"),
        (FileNotFoundError(2, "No such file or directory", "tale.txt"), "tale.txt: no such file or directory"),
        (ValueError(), "ValueError"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, told, broken_command, capsys):
    broken_command(error)
    assert cli.main(["broken"]) == 2
    assert one_error_line(capsys) == f"saccade: error: {told}\n"


def test_a_bug_keeps_its_traceback(broken_command):
    broken_command(AssertionError("an invariant of ours"))
    with pytest.raises(AssertionError, match="an invariant of ours"):
        cli.main(["broken"])


def test_a_traceback_can_be_asked_for(broken_command, monkeypatch):
    broken_command(ValueError("where does it come from?"))
    monkeypatch.setenv("SACCADE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="where does it come from"):
        cli.main(["broken"])


def test_ctrl_c_is_130_and_silent(broken_command, capsys):
    broken_command(KeyboardInterrupt())
    assert cli.main(["broken"]) == 130
    assert capsys.readouterr().out == ""


# Ctrl-C comes while Python searches for a module. What is raised there may also be swallowed: by a module of C++, which
# says ImportError, and in a destructor, where Python prints it and goes on.
INTERRUPTED = """
import os, signal, sys

class Swallowing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(9): pass

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            {how}
            for _ in range(9): pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
sys.meta_path.insert(0, Finder())
sys.argv = ["saccade", "look", "the cat"]
{start}
"""
HOW = {
    "raised": "os.kill(os.getpid(), signal.SIGINT)",
    "as an ImportError": "raise ImportError('initialization failed') from KeyboardInterrupt()",
    "in a destructor": "Swallowing()",
}
CONSOLE_SCRIPT = "from saccade.cli import main; sys.exit(main())"
MODULE = "import runpy; runpy.run_module('saccade', run_name='__main__')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "module", "how"),
    [
        (CONSOLE_SCRIPT, "typer", "raised"),
        (CONSOLE_SCRIPT, "torch", "raised"),
        (CONSOLE_SCRIPT, "torch", "as an ImportError"),
        (CONSOLE_SCRIPT, "torch", "in a destructor"),
        (MODULE, "saccade.cli", "raised"),  # what comes before, the interpreter answers: it ends by SIGINT
        (MODULE, "typer", "raised"),
        (MODULE, "torch", "raised"),
    ],
)
def test_ctrl_c_during_imports_is_130_and_nothing_else(start, module, how, tmp_path):
    script = INTERRUPTED.format(start=start, module=module, how=HOW[how])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("size", slow_after(1, [1, 10**6]), ids=["left in the buffer", "written while running"])
def test_the_reader_of_a_pipe_may_leave(size, tmp_path):
    script = tmp_path / "chatty.py"
    script.write_text(
        "import sys, time, typer\n"
        "from saccade.cli import _app, main\n"
        "_app.app = typer.Typer()\n"
        "@_app.app.command()\n"
        f"def chatty(): time.sleep(0.2); print('x' * {size})\n"
        "sys.exit(main([]))\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141  # not 1, which is what `verify` returns for errors that it found


def test_without_a_command_it_shows_help_with_examples(capsys):
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for expected in ("Usage: saccade", "look", "generate", "train", "Examples:", 'saccade look "'):
        assert expected in out


built = functools.cache(typer.main.get_command)


def help_of(*words):
    """Each command below `words`: its own words, and its help."""
    command = built(_app.app)
    context = typer.Context(command, info_name="saccade")
    for word in words:
        command = command.commands[word]
        context = typer.Context(command, info_name=word, parent=context)
    yield words, context.get_help()
    for word in getattr(command, "commands", ()):
        yield from help_of(*words, word)


def test_summaries_are_whole_and_arguments_are_spelled_one_way():
    usages = {}
    for words, text in help_of():
        first, _, rest = text.partition("\n")
        usages[" ".join(words)] = first.partition("[OPTIONS]")[2].strip()
        listed = rest.partition("Commands:\n")[2].split("\n\n")[0]
        assert "..." not in listed, listed
    assert usages == {
        "": "COMMAND [ARGS]...",
        "look": "[TEXT]...",
        "view": "[TEXT_OR_FILE]...",
        "diagram": "KIND",
        "step": "[TEXT]...",
        "heads": "[TEXT]...",
        "generate": "PROMPT",
        "embed": "FILE_OR_FOLDER",
        "prune": "MODEL",
        "distill": "TEACHER STUDENT DATA",
        "test": "RUN DATA",
        "predict": "RUN [INPUT]",
        "verify": "TARGET",
        "bench": "",
        "compare": "",
        "docs": "[WORDS]...",
        "plan": "",
        "doctor": "",
        "train": "COMMAND [ARGS]...",
        "train lm": "TEXT",
        **{f"train {task}": "DATA" for task in TASK_OPTIONS},
        "train rate": "TEXT",
    }


def test_an_option_without_its_value_is_shown_with_one(capsys):
    assert cli.main(["heads", "the cat", "--why", "cat"]) == 2
    example = (
        'as in: saccade heads "The cat sat on the mat. The cat sat on the" --why the:2 mat (see saccade heads --help)'
    )
    assert example in one_error_line(capsys)


@pytest.mark.parametrize("command", ["generate it", "train lm a.txt"])
def test_who_asks_for_a_device_learns_how_it_is_chosen(command, capsys):
    assert cli.main([*command.split(), "--device", "cuda"]) == 2
    assert "No such option: --device; training uses a GPU if PyTorch finds one" in one_error_line(capsys)


@pytest.mark.parametrize("later", ["serve"])
def test_no_command_is_promised_that_does_not_exist(later, capsys):
    assert cli.main([later]) == 2
    assert later in one_error_line(capsys)


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"saccade {__version__}\n"


def test_a_missing_extra_is_the_command_that_installs_it():
    require("json", "plot")
    with pytest.raises(NotInstalled, match=r'pip install "matplotlib>=3.9" "resvg-py>=0.5"$'):
        require("a_module_nobody_has", "plot")
    assert installing("study") == 'pip install "conllu>=6.0" "transformers>=5.0" "scikit-learn>=1.5"'  # study names hf


def test_a_command_names_itself_where_an_extra_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["view", "the cat"]) == 2
    assert one_error_line(capsys).startswith("saccade: error: saccade view needs starlette, which is not installed")


def test_on_the_path_alone_an_extra_comes_from_the_sources(monkeypatch):
    def unknown(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", unknown)
    assert installing("plot") == 'pip install -c constraints.txt ".[plot]" in the folder of Saccade'


def test_an_os_error_without_a_path_is_its_reason():
    assert one_line(OSError(28, "No space left on device")) == "no space left on device"
    assert one_line(OSError("said otherwise")) == "said otherwise"


def test_messages_name_options_and_nothing_else():
    options = {"rate": "--rate", "initial": "--from", "low": "--low", "skip_empty": "--skip-empty"}
    assert naming_options("rate: taken; or low=True, up=True", options) == "--rate: taken; or --low, up=True"
    for message, expected in (
        ("rate: must be positive", "--rate: must be positive"),
        ("initial: a/b is no start", "--from: a/b is no start"),
        ("rate, low: rise: low", "--rate, --low: rise: low"),
        ("rate, high: rise", "rate, high: rise"),  # one of them is no option
        ("rate.csv: line 3: the rate", "rate.csv: line 3: the rate"),
        ("rate", "rate"),
    ):
        assert naming_options(message, options) == expected
        assert naming_options(message, {}) == message


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell of POSIX does")
@pytest.mark.parametrize("closed", [">&- 2>&- <&-", ">&-", "2>&-", "<&-"])
def test_a_stream_that_the_shell_closed_is_no_error(tmp_path, closed):
    """What is printed must not end in a traceback, nor in the file that is written meanwhile."""
    command = f"{shlex.quote(sys.executable)} -m saccade diagram attention --out drawn.svg {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "drawn.svg").read_text().rstrip().endswith("</svg>")
