"""A running viewer: its port, its thread, its browser, and its end.

The browser gets the viewer's address from a file, so that the token is in no program's arguments, which every user of a
machine may read. Only this user can read the file; the page in it redirects to the address.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
import webbrowser
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....support._extras import installing

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from ._session import Session


HIGHEST_PORT = 65535
LONGEST_NAME = 80  # characters of a host in an error message
LOOPBACK = "127.0.0.1"
OTHERS = "other machines can open it under this computer's name or address, with the token"
MOST_IDLE = 600.0  # seconds without a page; open pages send a request every half minute
GRACE = 5.0  # seconds for running requests at the end
ADDRESS_LIFE = 120.0  # seconds; the browser may have to start first
_ADDRESS_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>Saccade</title>
<p><a href="{url}">The viewer</a></p>
</html>
"""


class Viewer:
    """A running viewer: a server on its own thread, until `close`, or until no page is open any more.

    `saccade.view` starts it. As a context manager it closes at the end of the block.

    Attributes:
        url: the address for a browser, with the token: everyone who has it sees everything that the viewer shows.
        lets_others_in: whether it listens on an address that other machines may reach.

    Example:
        >>> import torch, saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> with saccade.watch(layer, keep=True) as watched:
        ...     _ = layer(torch.randn(1, 5, 16), saccade.Causal())
        >>> with saccade.view(watched, words="The cat sat on it".split(), browser=False, block=False) as viewer:
        ...     print(viewer.lets_others_in)
        Viewer  http://127.0.0.1:...
        False
    """

    def __init__(
        self, session: Session, *, host: str | None = None, port: int | None = None, most_idle: float | None = None
    ):
        """Start the server. ``most_idle``: seconds without an open page after which the viewer ends; None means never.

        Raises:
            ImportError: starlette or uvicorn is not installed.
            TypeError: a host that is not a string, or a port that is not a whole number.
            ValueError: a port that is invalid, taken or not allowed, or a host that is not an address of this machine.
        """
        uvicorn = require_uvicorn()
        from . import _connections
        from ._app import Activity, Addresses, ViewerApp, client_script  # here: `saccade.view` is a light name

        client_script()  # raises an error now if the client is missing
        host = LOOPBACK if host is None else host
        listener = _listener(host, 0 if port is None else port)
        self.session, self._most_idle = session, most_idle
        self._activity = Activity()
        self._ended_idle = False
        bound, number = listener.getsockname()[:2]
        token, addresses = secrets.token_urlsafe(24), Addresses(bound, number, host)
        self.url = f"http://{_shown(addresses.bound)}:{number}/?token={token}"
        self.lets_others_in = not addresses.bound.is_loopback
        self._file = AddressFile(self.url)
        self._app = ViewerApp(session, token=token, addresses=addresses, activity=self._activity)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app,
                loop="asyncio",
                http=_connections.Connection,
                backlog=_connections.BACKLOG,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # forwarded headers could fake the client's address
                timeout_graceful_shutdown=1,
                callback_notify=self._look_at_activity,
                timeout_notify=0,
            )
        )
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="saccade-viewer", daemon=True)
        self._thread.start()

    async def _look_at_activity(self) -> None:
        """Called by the server each second."""
        self._file.expire()
        if self._most_idle is not None and self._activity.idle > self._most_idle:
            self._ended_idle = True
            self._server.should_exit = True

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def computing(self) -> bool:
        """Whether a thread still computes, as for some seconds after the end."""
        return self._app.workers.busy

    def open_browser(self) -> bool:
        """Open the page; returns whether a browser could be opened.

        Through a file that only this user can read, as others may read the arguments of programs; not needed on
        Windows.
        """
        if os.name != "posix":
            return open_browser(self.url)
        file = self._file.write()
        opened = file is not None and open_browser(file.as_uri())
        if not opened:
            self._file.remove()
        return opened

    def wait(self) -> bool:
        """Wait until the viewer ends; Ctrl-C closes it and raises KeyboardInterrupt.

        Returns:
            Whether it ended because no page was open any more.
        """
        try:
            while self._thread.is_alive():
                self._thread.join(0.5)  # an endless join could not be interrupted on Windows
        finally:
            self.close()
        return self._ended_idle

    def close(self) -> None:
        """End the viewer, and delete its files. Open pages report that it does not answer."""
        self._server.should_exit = True
        self._thread.join(GRACE)
        self._file.remove()
        self._app.workers.close()
        self.session.close()

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Viewer of {self.session.title!r} at {self.url}>" if self.running else "<Viewer, closed>"

    def _repr_html_(self) -> str:
        link = f'<a href="{escape(self.url)}" target="_blank" rel="noopener">{escape(self.session.title)}</a>'
        return f"Viewer of {link}" if self.running else "Viewer, closed"


def require_uvicorn() -> Any:
    """The uvicorn module. ImportError if it, or a package of the application, is not installed."""
    try:
        import starlette  # noqa: F401, the application is made of it
        import uvicorn
    except ImportError as error:
        raise ImportError(f"view: this needs {error.name}, which is not installed: {installing('view')}") from None
    return uvicorn


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket."""
    from ._connections import Listener

    _check_address(host, port)
    try:
        if not host.isprintable():
            raise ValueError  # the system would read the name only up to a zero
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = Listener(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host: {host} is not an address of this machine ({error.strerror})") from None
    except ValueError:  # a label of more than 63 letters, or a character not allowed in names
        raise ValueError(f"host: {repr(host)[:LONGEST_NAME]} is not the name of a machine") from None
    if os.name == "posix":  # elsewhere the option lets two servers share a port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(_why_not(error, host, port)) from None
    return listener


def _check_address(host: object, port: object) -> None:
    if not isinstance(host, str):
        raise TypeError(f"host: expected an address of this machine as a string, got {type(host).__name__}")
    if not host.strip():
        raise ValueError("host: expected an address of this machine, got an empty string")
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"port: expected a whole number from 0 to {HIGHEST_PORT:,}, got {port!r}")
    if not 0 <= port <= HIGHEST_PORT:
        raise ValueError(f"port: expected a whole number from 0 to {HIGHEST_PORT:,}, got {port:,}")


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port: {port} is taken by another program; without a port a free one is found"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"port: {port} may not be used by this account; those from 1024 on may"
    return f"host: {host} is not an address of this machine ({error.strerror})"


def _shown(bound: IPv4Address | IPv6Address) -> str:
    """The address in the form for a browser on this machine."""
    if bound.is_unspecified:
        return LOOPBACK if bound.version == 4 else "[::1]"
    return str(bound) if bound.version == 4 else f"[{bound}]"


def open_browser(url: str) -> bool:
    """Open the page; returns whether a browser could be opened.

    Browsers of the terminal are skipped: they would occupy the terminal and cannot show the page.
    """
    graphical = sys.platform in ("darwin", "win32", "cygwin") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if not graphical:
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


class AddressFile:
    """A page that redirects to ``url``, until it is removed, or `ADDRESS_LIFE` has passed and `expire` is called.

    A killed process leaves it, with an address that no longer answers.
    """

    def __init__(self, url: str):
        self._url = url
        self._folders: list[tuple[float, Path]] = []

    def write(self) -> Path | None:
        """The page, in a new folder that only this user can enter; None if the home folder is not the user's own.

        The folder is in the home folder itself: browsers packaged as snaps see neither hidden folders nor the system's
        temporary one. In another user's folder it could be replaced.
        """
        try:
            home = Path.home()
            if home.stat().st_uid != os.getuid():
                return None
            folder = Path(tempfile.mkdtemp(prefix="saccade-viewer-", dir=home))  # mode 0700
            self._folders.append((time.monotonic() + ADDRESS_LIFE, folder))
            path = folder / "open.html"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(_ADDRESS_PAGE.format(url=escape(self._url)))
        except (OSError, RuntimeError):  # no home, or it is not writable
            return None
        return path

    def expire(self) -> None:
        """Remove files that browsers have read by now."""
        self._remove(time.monotonic())

    def remove(self) -> None:
        self._remove(float("inf"))

    def _remove(self, now: float) -> None:
        for due in [entry for entry in self._folders if entry[0] <= now]:
            self._folders.remove(due)
            shutil.rmtree(due[1], ignore_errors=True)
