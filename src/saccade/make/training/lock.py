"""One run at a time in a folder: a lock that the system holds for a process, so that a killed run leaves none.

What a killed run leaves is the file, which says nothing: who locks it has it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import weakref
from pathlib import Path

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)  # of flock; of msvcrt


class FileLock:
    """The lock on a file, taken as it is made; `close` gives it up and removes the file.

    Args:
        path: the file; it is made, and its folder has to be there.

    Attributes:
        failure: why the system has no lock for this file, None if it has one: some file systems of networks.

    Raises:
        BlockingIOError: somebody has it. OSError: the file cannot be made.
    """

    def __init__(self, path: Path):
        self.failure: str | None = None
        self._path = path
        self._handle: int | None = None
        while self._handle is None:
            self._handle = self._opened()
        _HELD.add(self)

    def _opened(self) -> int | None:
        """The locked file; None where the one who had it has removed it since: another may be locked by that name."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _take(handle)
        except OSError as error:
            if error.errno in _TAKEN:
                os.close(handle)
                raise BlockingIOError(f"{self._path}: locked by another process") from None
            self.failure = error.strerror or str(error)
        if _is_at(self._path, handle):
            return handle
        os.close(handle)
        return None

    def close(self) -> None:
        """Give it up."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # Windows removes no open file
            self._path.unlink()
        self.let_go()
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self._path.unlink()

    def let_go(self) -> None:
        """Close the file of this process. Where others were forked from it or it from them, theirs keeps the lock."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _take(handle: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        return
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOLCK, "this system has no flock") from None
    # By open file and not, as lockf is, by process: two runs in one process are two runs.
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork() -> None:
    """A forked worker would keep the lock of a run that was killed for as long as it lives itself."""
    for lock in _HELD:
        lock.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
