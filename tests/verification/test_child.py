"""A target may crash, hang, print, exit or ask for what is not there: a finding comes of it, the other checks go on,
and nothing of it is left in this process."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import misbehaving
import pytest
import torch
from misbehaving import MODULE_READING, READING, Head
from torch import nn

from saccade.verification import Check, Inapplicable, Limits, verify
from saccade.verification.running import _child

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PATIENT = Limits(seconds=30.0, gib=0.5)  # for what ends by itself, so that a busy machine does not matter
SHORT = Limits(seconds=2.0, gib=0.5)


def call(subject):
    subject(subject.inputs())
    raise Inapplicable("it was called")
    yield


def rest(subject):
    yield from ()


# The first and the last call nothing; what the target does happens in between, and only once.
CHECKS = (
    Check("first", "scale", "one", "", "", rest),
    Check("second", "padding", "two", "", "", call),
    Check("third", "order", "three", "", "", rest),
)


@pytest.fixture(autouse=True)
def few_checks(monkeypatch):
    """Three checks in place of all: these tests are of the process around them."""
    monkeypatch.setattr("saccade.verification.checks.CHECKS", CHECKS)


def report_of(target, how=READING, causal=False, limits=PATIENT, **options):
    return verify(target, causal, how=how, limits=limits, **options)


def only(report):
    assert [finding.family for finding in report.errors] == ["robustness"], str(report)
    return report.errors[0]


def line_in(function, words):
    lines, start = inspect.getsourcelines(function)
    return start + next(at for at, line in enumerate(lines) if words in line)


@pytest.mark.parametrize(
    ("target", "words", "line"),
    [
        (misbehaving.segfaults, "segmentation fault", "string_at"),
        (misbehaving.aborts, "aborted", "os.abort"),
        pytest.param(
            misbehaving.loops, "did not finish within 2 seconds", "while True", marks=pytest.mark.slow, id="loops"
        ),
        pytest.param(
            misbehaving.sleeps, "did not finish within 2 seconds", "time.sleep", marks=pytest.mark.slow, id="sleeps"
        ),
        pytest.param(
            misbehaving.floods, "did not finish within 2 seconds", "os.write", marks=pytest.mark.slow, id="floods"
        ),
        (misbehaving.leaves, "ended the process with status 7", None),
        (misbehaving.exits, "exit(3)", "sys.exit"),
        (misbehaving.is_greedy, "more memory than the limit", "torch.zeros"),
        pytest.param(misbehaving.hoards, "more memory than the limit", "kept.append", marks=pytest.mark.slow),
        (misbehaving.wants_gpu, "a device that this machine lacks", "cuda:97"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_ends_a_program_is_a_finding_and_the_others_go_on(target, words, line):
    report = report_of(target, limits=SHORT if "finish" in words else PATIENT)
    found = only(report)
    assert words in found.message
    assert found.effect and found.fix
    assert [(outcome.name, outcome.status) for outcome in report.outcomes] == [
        ("first", "passed"),
        ("second", "failed"),
        ("third", "passed"),
    ]
    if line:
        assert found.location.path == misbehaving.__file__
        near = line_in(target, line)
        assert near <= found.location.line <= near + 1  # a loop's body is as true as its head
        assert found.location.function == target.__name__


def test_endless_recursion_is_an_error_of_the_call():
    report = report_of(misbehaving.recurses)
    assert [finding.family for finding in report.errors] == ["padding"]
    assert "RecursionError" in report.errors[0].message
    assert report.errors[0].location.function == "recurses"


@pytest.mark.parametrize("isolated", [True, False])
def test_any_class_of_error_is_an_error_of_the_call(isolated):
    report = report_of(misbehaving.raises_the_unspeakable, isolated=isolated)
    assert [finding.family for finding in report.errors] == ["padding"]
    assert "raised Unspeakable: (its message raises an error itself)" in report.errors[0].message
    assert [outcome.status for outcome in report.outcomes] == ["passed", "failed", "passed"]


@pytest.mark.slow
@on_linux
def test_a_copy_that_the_target_makes_of_its_process_has_no_say(tmp_path):
    report = report_of(misbehaving.Forks(str(tmp_path / "calls")))
    assert [outcome.name for outcome in report.outcomes] == ["first", "second", "third"]
    callers = (tmp_path / "calls").read_text().split()
    assert len(callers) > 5 and len(set(callers)) == 1  # no copy calls again, and copies itself


def test_a_process_that_may_start_none_says_so(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ValueError, match="daemon process of multiprocessing.*isolated=False"):
        report_of(misbehaving.right)


def test_exit_is_told_without_a_child_too():
    report = report_of(misbehaving.exits, isolated=False)
    assert "exit(3)" in only(report).message
    assert report.outcomes[-1].status == "passed"


@pytest.mark.slow
def test_after_three_hangs_the_rest_is_left_out(monkeypatch):
    names = ("scale", "softmax", "padding", "order", "cache")
    monkeypatch.setattr("saccade.verification.checks.CHECKS", [Check(n, n, "", "", "", call) for n in names])
    report = report_of(misbehaving.sleeps, limits=Limits(seconds=1.0))
    assert [outcome.status for outcome in report.outcomes] == ["failed", "n/a", "n/a", "n/a", "n/a"]
    assert [outcome.reason for outcome in report.outcomes[3:]] == ["not run: 3 checks ran out of time before"] * 2
    assert "scale" in report.outcomes[1].reason  # the same hang at the same line is told once
    only(report)


# What the target writes


def test_what_it_prints_is_a_note_and_not_our_output(capfd):
    report = report_of(misbehaving.prints)
    assert capfd.readouterr() == ("", "")
    assert report.ok
    words = ["from Python", "from a shell", "from a shell that complains", "from C", ""]
    assert set(report.printed.split("\n")) == set(words)
    (note,) = report.findings
    assert (note.severity, note.family) == ("note", "robustness")
    assert "from Python / from a shell" in note.message


@pytest.mark.slow
def test_what_was_waiting_to_be_written_is_not_the_targets():
    code = """
        import sys
        sys.stdout.write("waiting ")  # no newline: it stands in the buffer when the child is forked
        sys.path.insert(0, sys.argv[1])
        import misbehaving, saccade
        report = saccade.verify(misbehaving.right, False, how=misbehaving.READING, checks=["scale"])
        sys.stdout.write(repr(report.printed))
    """
    done = run_python(code, str(Path(misbehaving.__file__).parent))
    assert done.stdout == "waiting ''"


def test_a_flood_of_output_neither_blocks_nor_fills_the_memory():
    report = report_of(misbehaving.chatters)
    assert report.ok
    assert len(report.printed) == 64 * 2**10


def test_warnings_of_the_target_are_not_noise():
    assert report_of(misbehaving.warns).findings == ()
    assert report_of(misbehaving.warns, isolated=False).findings == ()


def test_standard_input_is_empty():
    report = report_of(misbehaving.reads_input)
    assert "EOFError" in report.errors[0].message


# What is left behind


def children():
    return [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(true, seconds=10.0):
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


@on_linux
@pytest.mark.parametrize(
    "target", [misbehaving.right, misbehaving.segfaults, pytest.param(misbehaving.sleeps, marks=pytest.mark.slow)]
)
def test_no_process_file_or_descriptor_stays(target, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)
    before = children(), sorted(os.listdir("/proc/self/fd")), threading.active_count()
    report_of(target, limits=SHORT)
    assert (children(), sorted(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert list(tmp_path.iterdir()) == []


@on_linux
@pytest.mark.parametrize("target", [misbehaving.starts_others, misbehaving.starts_a_daemon])
def test_what_the_target_starts_is_ended_with_it(target):
    report = report_of(target)
    pid = int(report.printed.split()[1])
    assert wait_until(lambda: not is_alive(pid))


def test_this_process_is_as_it_was():
    def state():
        settings = torch.get_default_dtype(), torch.get_num_threads(), torch.initial_seed()
        generator = torch.get_rng_state().tolist()
        return settings, generator, dict(os.environ), os.getcwd(), list(sys.path), set(sys.modules), sys.stdout

    before = state()
    report = report_of(misbehaving.dirties)
    assert state() == before
    assert [outcome.status for outcome in report.outcomes] == ["passed", "n/a", "passed"]


# How a target reaches the child


def test_closures_and_classes_of_a_function_reach_the_child():
    factor = READING.width**-0.5

    class Local(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT * factor).softmax(-1) @ v

    for target in (Local(), lambda q, k, v: (q @ k.mT * factor).softmax(-1) @ v):
        report = report_of(target)
        assert report.ok, str(report)
        assert report.outcomes[1].reason == "it was called"


def test_a_child_works_after_this_process_used_threads_and_autograd():
    """GNU OpenMP hangs in a forked child whose parent had a team of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        x = torch.randn(701, 701, requires_grad=True)
        (x @ x).softmax(-1).sum().backward()
        report = report_of(Head(), MODULE_READING)
    finally:
        torch.set_num_threads(before)
    assert report.ok, str(report)
    assert report.outcomes[1].reason == "it was called"


def test_the_warning_of_a_fork_among_threads_is_silenced(monkeypatch):
    fork = os.fork

    def warning():
        import warnings

        warnings.warn("This process is multi-threaded, use of fork() may lead to deadlocks", DeprecationWarning, 2)
        return fork()

    monkeypatch.setattr(os, "fork", warning)
    assert report_of(misbehaving.right).ok


@pytest.mark.slow
def test_without_fork_the_target_is_pickled(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    monkeypatch.setattr("saccade.verification.checks.CHECKS", (Check("scale", "scale", "", "", "", rest),))
    report = report_of(torch.nn.functional.scaled_dot_product_attention)
    assert report.called.startswith("scaled_dot_product_attention(query, key, value)")
    assert [outcome.name for outcome in report.outcomes] == ["scale"]


def test_what_cannot_be_pickled_is_refused_with_two_ways_out(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ValueError) as raised:
        report_of(lambda q, k, v: v)
    assert re.search(r"isolated=False.*path/to/file.py:Name", str(raised.value))


def test_a_fork_that_cannot_go_on_is_replaced(monkeypatch):
    monkeypatch.setattr("saccade.verification.running._child._spoilt", lambda: True)
    with pytest.raises(ValueError, match="isolated=False"):
        report_of(lambda q, k, v: v)


def test_a_stage_is_waited_for_as_long_as_the_limit_says(monkeypatch):
    """A wait of another length ends in the same words, and nobody waits for it in a fast test."""
    waits, wait = [], _child.wait
    monkeypatch.setattr(_child, "wait", lambda readers, seconds: waits.append(seconds) or wait(readers, seconds))
    assert report_of(misbehaving.right).outcomes
    assert 0 < waits[-1] <= PATIENT.seconds < waits[0] <= _child.STARTING


def test_limits_are_checked():
    with pytest.raises(ValueError, match="limits: seconds is 0; expected a number above 0"):
        Limits(seconds=0)
    with pytest.raises(ValueError, match="limits: gib is -1"):
        Limits(gib=-1)


# Files whose import misbehaves


def file_of(folder, code):
    path = folder / "theirs.py"
    path.write_text(textwrap.dedent(code))
    return f"{path}:attend"


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        ("import torch\n\nraise KeyError('weights')\n", "KeyError: 'weights'", 3),
        ("import sys\n\n\nsys.exit('no')\n", "exit('no')", 4),
        pytest.param(
            "import time\nwhile True:\n    time.sleep(1)\n",
            "did not finish within 2 seconds",
            3,
            marks=pytest.mark.slow,
            id="hangs",
        ),
        ("import os\nos.abort()\n", "aborted", 2),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'", 1),
        ("import torch\nx = torch.zeros(2, device='cuda:97')\n", "a device that this machine lacks", 2),
        ("def attend(q, k, v)\n    return v\n", "SyntaxError", None),
    ],
    ids="raises exits hangs aborts imports gpu syntax".split(),
)
def test_a_file_that_cannot_be_imported_is_one_finding(tmp_path, code, words, line):
    report = report_of(file_of(tmp_path, code), limits=SHORT if "finish" in words else PATIENT)
    found = only(report)
    assert found.message.startswith("No check could be run: importing it failed. ")
    assert words in found.message
    assert report.outcomes == ()
    if line:
        assert (found.location.path, found.location.line) == (str(tmp_path / "theirs.py"), line)


# Ends from outside


def run_python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, check=True, **options
    )


@pytest.mark.slow
@on_linux
def test_interrupting_this_process_ends_the_child():
    """This process is a fork of the one that tests, which has imported what it needs."""
    ours, theirs = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            report_of(misbehaving.sleeps, progress=lambda done, of, name: os.write(theirs, b"."))
        except KeyboardInterrupt:
            os._exit(130)
        finally:
            os._exit(0)
    try:
        os.close(theirs)
        assert os.read(ours, 1)
        time.sleep(0.3)  # an interrupt that comes while Python forks may be lost: now the child is at work
        (child,) = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        os.kill(parent, signal.SIGINT)
        assert wait_until(lambda: not is_alive(child))
    finally:
        os.close(ours)
        if not wait_until(lambda: not is_alive(parent)):
            os.kill(parent, signal.SIGKILL)
        _, status = os.waitpid(parent, 0)
    assert os.waitstatus_to_exitcode(status) == 130


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupting_or_killing_a_program_ends_the_child(number):
    code = """
        import signal, sys
        # A shell that starts a job in the background has it ignore the signal, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.insert(0, sys.argv[1])
        import misbehaving, saccade

        def tell(done, of, name):
            print(name, flush=True)

        how = misbehaving.READING
        saccade.verify(misbehaving.sleeps, False, how=how, checks=["causal-leak"], progress=tell)
    """
    folder = str(Path(misbehaving.__file__).parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        # An interrupt that comes while Python forks or imports may be lost: this one comes while the child is at work.
        assert parent.stdout.readline()
        time.sleep(0.3)
        told = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text()
        (child,) = [int(pid) for pid in told.split()]
        parent.send_signal(number)
        assert parent.wait(30) != 0
        assert wait_until(lambda: not is_alive(child))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
