"""`saccade` commands without their imports: one process has imported what they need, and each runs in a fork of it.

`program(folder)` writes a program `saccade` that hands its arguments, its environment, its folder and its three streams
to that process, and ends with the status that comes back. What a command does to its own process is gone with it. That
a fresh process can run the command is asked in `tests/cli`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

SRC = Path(__file__).parents[2] / "src"
# What takes long to import, of what commands import.
_NEEDED = (
    "torch._dynamo saccade.cli._app saccade.benchmark saccade.inspection saccade.tasks saccade.training "
    "saccade.verification saccade.viewer._report saccade.viewer._terminal matplotlib.pyplot accelerate"
).split()
_CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as to:
    to.connect({address!r})
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(to, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    to.sendall(asked)
    sys.exit(int(to.recv(8) or 70))
"""


def program(folder: Path) -> Path:
    """A program `saccade` in `folder`."""
    path = folder / "saccade"
    path.write_text(_CLIENT.format(python=sys.executable, address=_address()))
    path.chmod(0o755)
    return path


def pythonpath() -> str:
    """PYTHONPATH with this checkout first."""
    return os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])


@functools.cache
def _address() -> str:
    """Where the process listens, which is started once and ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="saccade-warm-")
    address = f"{folder.name}/socket"
    # One thread: on models this small, two mostly wait for each other, and no fork has to do without its team.
    environment = {**os.environ, "PYTHONPATH": pythonpath(), "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )

    def end() -> None:
        server.stdin.close()
        server.wait()
        server.stdout.close()
        folder.cleanup()

    atexit.register(end)
    assert server.stdout.readline() == b"ready\n"
    return address


def _serve(address: str) -> None:
    """Take commands until whoever started this is gone, which closes standard input."""
    import gc
    import importlib
    import select

    for name in _NEEDED:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listening, sys.stdin], [], [])
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if sys.stdin in ready:
                return
            connection, _ = listening.accept()
            with connection:
                if os.fork() == 0:
                    listening.close()
                    _answer(connection)


def _answer(connection: socket.socket) -> NoReturn:
    """Run a command in a process of its own, and tell how it ended."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    asked = b""
    while len(asked) < int.from_bytes(length, "big"):
        asked += connection.recv(65536)
    command = os.fork()
    if command == 0:
        connection.close()
        os._exit(_run(streams, *json.loads(asked)))
    status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    connection.sendall(str(status if status >= 0 else 128 - status).encode())
    os._exit(0)


def _run(streams: list[int], arguments: list[str], folder: str, environment: dict[str, str]) -> int:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["saccade", *arguments]
    try:
        from saccade.cli import main

        status = main()
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


if __name__ == "__main__":
    _serve(sys.argv[1])
