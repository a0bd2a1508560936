"""The address at which a browser is opened, which must not tell the token.

A browser gets its address as an argument, and on Linux every user of a machine can read the arguments of all programs.
So the address holds an invitation: it is taken once, over a connection of the user who runs the viewer, and the answer
to it is the address with the token. (A file that sends the browser on is not read by those that come as a snap.)
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
from pathlib import Path

CONNECTIONS = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"


class Invitations:
    """Those that were not taken yet."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def new(self) -> str:
        invitation = secrets.token_urlsafe(24)
        self._open.add(invitation)
        return invitation

    def take(self, invitation: str, client_port: int, server_port: int) -> bool:
        """Whether it may be followed; then it is used up."""
        if invitation not in self._open or owners(client_port, server_port) != {os.getuid()}:
            return False
        self._open.discard(invitation)
        return True


def are_needed() -> bool:
    """Whether others can read the arguments of programs here. (Windows opens what WSL asks for, where they cannot.)"""
    return sys.platform == "linux" and "microsoft" not in platform.release().lower()


def owners(client_port: int, server_port: int) -> set[int]:
    """The numbers of the users whose programs hold connections of this machine from one of these ports to the other."""
    found = set()
    for path in map(Path, CONNECTIONS):
        try:
            lines = path.read_text("ascii").splitlines()[1:]
        except OSError:  # no such table; who asks is then unknown
            continue
        for _, local, remote, state, _, _, _, user, *_ in map(str.split, lines):
            ports = tuple(int(end.rpartition(":")[2], 16) for end in (local, remote))
            if state == ESTABLISHED and ports == (client_port, server_port):
                found.add(int(user))
    return found
