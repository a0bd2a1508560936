"""Connections: idle ones are closed, and no number of them stops the viewer."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from . import _app

MOST = 100  # connections at a time; a browser opens six for one page
BACKLOG = 32  # connections accepted before the first of them is handled
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection(H11Protocol):
    """A connection that is closed if its request is not complete within `_app.PATIENCE`."""

    _deadline: Any = None

    @property
    def _waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._began = time.monotonic()
        self._limit()
        if len(self.connections) > MOST:
            connections: list[Any] = list(self.connections)  # of this class, all of them
            oldest = min(connections, key=lambda other: (not other._waits, other._began))
            self.connections.discard(oldest)  # before it is lost, or the next connection would choose it again
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _limit(self) -> None:
        if not self._waits:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_app.PATIENCE, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Listener(socket.socket):
    """A listening socket; if the process has no file descriptor left it closes the next connection.

    asyncio would report thousands of failed attempts a second, and leave the connection in the queue.
    """

    _spare: int | None = None

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(backlog)
        if self._spare is None:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._refuse()
            raise BlockingIOError from None  # to asyncio: nothing to accept for now

    def close(self) -> None:
        super().close()
        self._release()

    def _refuse(self) -> None:
        """Close one waiting connection, with the reserved descriptor."""
        self._release()
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        except OSError:  # another thread accepted it
            time.sleep(0.1)

    def _release(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
