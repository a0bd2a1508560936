"""A viewer on a real port: its address, the browser, and every way in which it ends."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

import pytest

import saccade
from saccade.viewer.server import _app, _serve, _view
from saccade.viewer.server._serve import Viewer, open_browser
from saccade.viewer.server._view import open_session
from slowly import slow_after

TEXT = "The hen met the fox."
# Starlette and uvicorn are imported here for the first time, whatever they warn of in their own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def session():
    """It outlives the viewers that show it."""
    session = open_session(TEXT)
    session.close = lambda: None
    return session


def call(viewer, op, params=None, *, token=None):
    """The header of a reply, over HTTP."""
    base, _, given = viewer.url.partition("/?token=")
    request = urllib.request.Request(f"{base}/api/{op}", json.dumps(params or {}).encode(), method="POST")
    request.add_header("X-Saccade-Token", given if token is None else token)
    with urllib.request.urlopen(request, timeout=20) as response:
        content = response.read()
    [size] = struct.unpack_from("<I", content)
    return json.loads(content[4 : 4 + size])


def test_it_answers_until_it_is_closed(session):
    with Viewer(session) as viewer:
        with urllib.request.urlopen(viewer.url, timeout=20) as page:
            assert b"<title>The hen met the fox." in page.read()
        assert call(viewer, "open")["runs"][0]["text"] == TEXT
        with pytest.raises(urllib.error.HTTPError, match="403"):
            call(viewer, "open", token="guessed")
        assert viewer.running and repr(viewer) == f"<Viewer of {TEXT!r} at {viewer.url}>"
    assert not viewer.running and repr(viewer) == "<Viewer, closed>"
    with pytest.raises(urllib.error.URLError, match="refused"):
        call(viewer, "open")
    viewer.close()  # once more does no harm
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("saccade-viewer") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_listens_on_the_loopback_alone_and_every_token_is_another(session):
    with Viewer(session) as one, Viewer(session) as other:
        assert one.url.startswith("http://127.0.0.1:")
        assert one.url.partition("token=")[2] != other.url.partition("token=")[2] != ""
        assert len(one.url.partition("token=")[2]) >= 32
        port = int(one.url.split(":")[2].partition("/")[0])
        elsewhere = {address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
        for address in elsewhere - {"127.0.0.1", "127.0.1.1"}:
            with pytest.raises(OSError):
                socket.create_connection((address, port), timeout=2).close()


def test_a_port_that_is_taken_is_told_and_a_free_one_is_used(session):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port: {port} is taken by another program; without a port a free one"):
            Viewer(session, port=port)
    with Viewer(session, port=port) as viewer:
        assert f":{port}/" in viewer.url and call(viewer, "alive") == {"buffers": []}


@pytest.mark.parametrize(
    ("host", "shown", "others"),
    slow_after(
        4,
        [
            ("0.0.0.0", "127.0.0.1", True),
            ("0", "127.0.0.1", True),
            ("::", "[::1]", True),
            ("0::0", "[::1]", True),
            ("localhost", None, False),
            ("127.1", "127.0.0.1", False),
            ("127.0.0.2", "127.0.0.2", False),
            ("::1", "[::1]", False),
        ],
    ),
)
def test_another_address_is_known_by_what_the_socket_is_bound_to(session, host, shown, others, capsys):
    """However it is written: the address that is printed answers, and where other machines come in that is said."""
    try:
        viewer = Viewer(session, host=host)
    except ValueError:
        assert ":" in host  # a machine without IPv6
        return
    with viewer:
        assert call(viewer, "alive") == {"buffers": []}
        assert shown is None or viewer.url.startswith(f"http://{shown}:")
        _view.announce(viewer, browser=False)
        assert ("Other machines can open it" in capsys.readouterr().err) == others


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_a_host_that_is_not_here_is_told(session, host):
    with pytest.raises(ValueError, match=f"^host: {host} is not an address of this machine"):
        Viewer(session, host=host)


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ({"port": 65536}, ValueError, "^port: expected a whole number from 0 to 65,535, got 65,536$"),
        ({"port": -1}, ValueError, "^port: .* got -1$"),
        ({"port": 2**70}, ValueError, "^port: "),
        ({"port": True}, TypeError, "^port: .* got True$"),
        ({"port": "8080"}, TypeError, "^port: .* got '8080'$"),
        ({"port": 80.5}, TypeError, "^port: "),
        ({"host": 1}, TypeError, "^host: expected an address .* got int$"),
        ({"host": ""}, ValueError, "^host: expected an address of this machine, got an empty string$"),
        ({"host": "a" * 64 + ".example"}, ValueError, "^host: 'aaa.* is not the name of a machine$"),
        ({"host": "\u2603" * 70}, ValueError, "^host: '\u2603.* is not the name of a machine$"),
        ({"host": "a..b"}, ValueError, "^host: "),
        ({"host": "127.0.0.1\0"}, ValueError, "^host: "),
        ({"host": "\ud800"}, ValueError, "^host: "),
    ],
)
def test_what_is_no_address_is_told(session, where, error, told):
    with pytest.raises(error, match=told):
        Viewer(session, **where)


def status_of(url, **headers):
    """Of a browser that goes to a page: where it comes to, and with which status."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as page:
            return page.url, page.status
    except urllib.error.HTTPError as error:
        return error.url, error.code


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """What a browser is told to open, by a user whose home is empty."""
    found = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(_serve, "open_browser", lambda url: found.append(url) or True)
    return found


posix = pytest.mark.skipif(os.name != "posix", reason="Windows shows arguments of programs to nobody else")


@posix
def test_the_token_is_no_argument_of_the_browser(session, opened, tmp_path):
    """Every user of the machine can read it there. What is read instead only this user can follow."""
    with Viewer(session) as viewer:
        assert viewer.open_browser()
        [url] = opened
        token = viewer.url.partition("token=")[2]
        assert url.startswith("file:///") and token not in url
        file = Path(urllib.request.url2pathname(url.removeprefix("file://")))
        assert file.parent.parent == tmp_path and not file.parent.name.startswith(".")  # what a snap may read
        assert [stat.S_IMODE(one.stat().st_mode) for one in (file, file.parent)] == [0o600, 0o700]
        [target] = re.findall(r'content="0; url=([^"]+)"', file.read_text())
        assert status_of(html.unescape(target)) == (viewer.url, 200)
        server = viewer.url.partition("?")[0]
        for path in ("", "?invitation=", f"?invitation={file.parent.name}", "?token="):  # nothing else lets anybody in
            assert status_of(server + path, **{"X-Forwarded-For": "127.0.0.1:80"})[1] == 403
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@posix
@pytest.mark.parametrize("after", ["a while", "no browser"])
def test_the_file_of_the_address_goes(session, opened, tmp_path, monkeypatch, after):
    with Viewer(session) as viewer:
        if after == "a while":
            monkeypatch.setattr(_serve, "ADDRESS_LIFE", 0.0)
            assert viewer.open_browser()
        else:
            monkeypatch.setattr(_serve, "open_browser", lambda url: False)
            assert not viewer.open_browser()
        deadline = time.monotonic() + 5  # it looks once a second
        while list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@posix
@pytest.mark.parametrize("home", ["none", "of another"])
def test_without_a_home_of_ones_own_the_address_is_only_printed(session, opened, tmp_path, monkeypatch, capsys, home):
    """In the folder of another user the file could be put in another's place."""
    if home == "none":
        monkeypatch.setenv("HOME", str(tmp_path / "none"))
    else:
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with Viewer(session) as viewer:
        _view.announce(viewer, browser=True)
        assert opened == [] and list(tmp_path.iterdir()) == []
        assert "open this address" in capsys.readouterr().err


def test_where_arguments_are_private_the_browser_gets_the_whole_address(session, opened, monkeypatch):
    with Viewer(session) as viewer:
        monkeypatch.setattr(os, "name", "nt")
        assert viewer.open_browser() and opened == [viewer.url]
        monkeypatch.undo()


@pytest.mark.slow
def test_two_pages_at_once():
    place = {"run": "0", "call": "0", "head": 0, "item": 0}
    with Viewer(open_session(TEXT)) as viewer:
        replies = []

        def ask():
            replies.append([call(viewer, "cell", {**place, "row": 3, "key": key}) for key in range(4)])

        pages = [threading.Thread(target=ask) for _ in range(2)]
        for page in pages:
            page.start()
        for page in pages:
            page.join()
    assert replies[0] == replies[1] and sum(reply["weight"] for reply in replies[0]) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_without_a_page_it_ends_and_says_so_and_a_heartbeat_keeps_it(session):
    viewer = Viewer(session, most_idle=1.2)
    beating = time.monotonic() + 2.5
    while time.monotonic() < beating:
        call(viewer, "alive")
        time.sleep(0.2)
    assert viewer.running
    assert viewer.wait() and not viewer.running


@pytest.mark.slow
def test_with_keep_it_does_not_end(session):
    with Viewer(session, most_idle=None) as viewer:
        viewer._activity.last = time.monotonic() - 1e6
        time.sleep(1.5)  # it looks once a second
        assert call(viewer, "alive") == {"buffers": []}
    assert not viewer.wait()  # closed, not left alone


def test_a_client_that_is_missing_is_told_at_the_start(session, monkeypatch):
    def missing():
        raise FileNotFoundError("client.js")

    monkeypatch.setattr(_app, "client_script", missing)
    with pytest.raises(FileNotFoundError, match="client.js"):
        Viewer(session)


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_a_missing_extra_is_named_before_anything_is_read(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(_view, "open_session", lambda *_, **__: pytest.fail("read before it was checked"))
    with pytest.raises(ImportError, match=rf'{module}, which is not installed: pip install "anywidget>=0.9.13"'):
        saccade.view(TEXT, block=False)


def test_the_browser_is_opened_where_there_is_one(monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not open_browser("http://127.0.0.1:1/")  # a text browser would take the terminal
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert open_browser("http://127.0.0.1:2/") and opened == ["http://127.0.0.1:2/"]

    def none(url):
        raise webbrowser.Error("no browser")

    monkeypatch.setattr(webbrowser, "open", none)
    assert not open_browser("http://127.0.0.1:3/")


@pytest.mark.slow
def test_from_python_it_goes_on_beside_the_prompt(capsys, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr(_serve, "open_browser", lambda url: False)
    with saccade.view(TEXT, block=False) as viewer:
        out, err = capsys.readouterr()
        assert out == f"Viewer  {viewer.url}\n" and "No browser" in err
        assert call(viewer, "open")["title"] == TEXT
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with saccade.view(TEXT, browser=False) as viewer:  # a prompt is not held up
        assert viewer.running and viewer._most_idle is None
    assert "No browser" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_waits_for_the_page_or_ctrl_c(monkeypatch, capsys):
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.setattr(_view, "_ipython", lambda: None)
    monkeypatch.setattr(_view, "MOST_IDLE", 0.1)
    assert not saccade.view(TEXT, browser=False).running
    assert "No page is open any more" in capsys.readouterr().err

    def interrupted(thread, timeout=None):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    assert not saccade.view(TEXT, browser=False, keep=True).running  # the script's next line is reached
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C of another process is a signal")
@pytest.mark.parametrize("arguments", [[], ["--keep"]])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command(arguments, number, tmp_path):
    """Ctrl-C, or an end that another program asks for: nothing stays."""
    command = [sys.executable, "-m", "saccade", "view", TEXT, "--no-browser", "--folder", tmp_path, "--budget", "1B"]
    with started([*command, *arguments]) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            url = child.stdout.readline().split()[1]
            assert mapped_by(child) or sys.platform != "linux"
            with urllib.request.urlopen(url, timeout=20) as page:
                assert page.status == 200
            child.send_signal(number)
            assert child.wait(20) == 128 + number
            assert child.stderr.read() == ""
            assert list(tmp_path.iterdir()) == []  # what was kept in files is gone
        finally:
            child.kill()


def started(command):
    """A command that hears Ctrl-C: of the tests themselves, a shell's background processes ignore it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **pipes)


def mapped_by(child):
    """Whether queries and keys are mapped from files there."""
    maps = Path(f"/proc/{child.pid}/maps")
    return maps.exists() and "/saccade-" in maps.read_text()


def unanswered(request):
    with contextlib.suppress(OSError):
        urllib.request.urlopen(request)


SLOW = """
import os, sys, time
from saccade.viewer.maps import Run
def slow(*_):
    os.write(1, b"begun\\n")  # in one piece, whichever thread writes
    time.sleep(120)
Run.overview = slow
from saccade.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C of another process is a signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_no_walk(number, tmp_path):
    """All threads that walk are at work, and one cannot be interrupted: the command ends, and so do its files."""
    command = [sys.executable, "-c", SLOW, "view", TEXT, "--no-browser", "--folder", tmp_path, "--budget", "1B"]
    with started(command) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            base, _, token = child.stdout.readline().split()[1].partition("/?token=")
            assert "Ctrl-C" in child.stdout.readline()
            ask = urllib.request.Request(f"{base}/api/overview", b'{"run": "0", "item": 0}', {"X-Saccade-Token": token})
            for _ in range(3):
                threading.Thread(target=unanswered, args=(ask,), daemon=True).start()
            assert child.stdout.readline() == "begun\n"
            assert mapped_by(child) or sys.platform != "linux"
            child.send_signal(number)
            assert child.wait(20) == 128 + number
            assert child.stderr.read() == "" and list(tmp_path.iterdir()) == []
        finally:
            child.kill()


def connected(viewer, count=1):
    host, _, port = viewer.url.partition("//")[2].partition("/")[0].rpartition(":")
    return [socket.create_connection((host, int(port)), timeout=20) for _ in range(count)]


@pytest.mark.parametrize("sent", slow_after(2, [b"", b"GET /client.js HT", b"GET /gone HTTP/1.1\r\nHost: x\r\n\r\nG"]))
def test_a_connection_whose_request_does_not_come_is_closed(session, monkeypatch, sent):
    monkeypatch.setattr(_app, "PATIENCE", 0.1)
    with Viewer(session) as viewer, connected(viewer)[0] as silent:
        silent.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            while silent.recv(2**16):  # until it is closed; a timeout is an error
                pass


def test_a_body_that_does_not_come_is_answered(session, monkeypatch):
    monkeypatch.setattr(_app, "PATIENCE", 0.1)
    with Viewer(session) as viewer, connected(viewer)[0] as silent:
        address, _, token = viewer.url.partition("//")[2].partition("/?token=")
        head = f"POST /api/open HTTP/1.1\r\nHost: {address}\r\nX-Saccade-Token: {token}\r\nContent-Length: 9\r\n\r\n"
        silent.sendall(head.encode())
        assert silent.recv(2**16).startswith(b"HTTP/1.1 408")


def test_silent_connections_leave_room_for_a_page(session, monkeypatch):
    from saccade.viewer.server import _connections

    monkeypatch.setattr(_connections, "MOST", 7)
    with Viewer(session) as viewer, contextlib.ExitStack() as silent:
        for each in connected(viewer, 23):
            silent.enter_context(each)
        assert call(viewer, "open")["runs"]
        assert len(viewer._server.server_state.connections) <= 7


@pytest.mark.slow
def test_without_descriptors_connections_are_refused_in_silence(tmp_path):
    script = """
import os, resource, socket, saccade
viewer = saccade.view("I will go", browser=False, block=False)
host, _, place = viewer.url.partition("//")[2].partition("/")
port = host.rpartition(":")[2]
with socket.create_connection(("127.0.0.1", int(port))) as first:
    first.sendall(f"GET /{place} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode())
    assert first.recv(12) == b"HTTP/1.1 200"
    while first.recv(65536):  # to the end: the viewer has closed it, and its descriptor is free
        pass
clients = [socket.socket() for _ in range(3)]
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, ) * 2)
kept = []
try:
    while True:
        kept.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for client in clients[:2]:
    client.settimeout(10)
    client.connect(("127.0.0.1", int(port)))
    try:
        assert client.recv(1) == b""
    except ConnectionResetError:
        pass
for each in kept:
    os.close(each)
clients[2].settimeout(10)
clients[2].connect(("127.0.0.1", int(port)))
clients[2].sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
assert clients[2].recv(12) == b"HTTP/1.1 403"
viewer.close()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
