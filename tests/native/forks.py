"""Code in processes of its own, at the price of one: each part is a fork of a process that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NamedTuple

SCRIPT = """
for number, part in enumerate(parts):
    child = os.fork()
    if child == 0:
        for stream in (1, 2):
            os.dup2(os.open(f"{folder}/{number}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        signal.alarm(200)
        status = 1
        try:
            exec(part, globals())
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Ended(NamedTuple):
    status: int  # as of subprocess: the signal that ended it, negative
    out: str
    err: str


def in_forks(header: str, parts: dict[str, str], folder, **environment: str) -> dict[str, Ended]:
    """How each of `parts` ended, run after `header`, which starts no threads."""
    start = f"import os, signal, sys, traceback\nsys.path[:0] = {sys.path!r}\nfolder = {str(folder)!r}\n"
    code = f"{start}{header}\nparts = {json.dumps([*parts.values()])}\n{SCRIPT}"
    command = [sys.executable, "-u", "-W", "ignore", "-X", "faulthandler", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    texts = [[(folder / f"{n}.{stream}").read_text() for stream in (1, 2)] for n in range(len(parts))]
    return {name: Ended(int(s), *t) for name, s, t in zip(parts, done.stdout.split(), texts, strict=True)}
