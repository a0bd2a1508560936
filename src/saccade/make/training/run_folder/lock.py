"""A lock for one run at a time in a folder. The system holds it for the process, so a killed run leaves no lock.

A killed run leaves the file, which alone means nothing: only a lock on it counts.
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
    """An exclusive lock on a file, taken by the constructor; `close` releases it and removes the file.

    Args:
        path: the file to create; its folder must exist.

    Attributes:
        failure: the reason if the file system does not support locks, as some network file systems; else None.

    Raises:
        BlockingIOError: another process holds the lock. OSError: the file cannot be created.
    """

    def __init__(self, path: Path):
        self.failure: str | None = None
        self._path = path
        self._handle: int | None = None
        while self._handle is None:
            self._handle = self._opened()
        _HELD.add(self)

    def _opened(self) -> int | None:
        """The handle of the locked file; None if its last owner removed it meanwhile: the name may be of a new file."""
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
        """Release the lock and remove the file."""
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # Windows does not remove open files
            self._path.unlink()
        self.let_go()
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self._path.unlink()

    def let_go(self) -> None:
        """Close this process's handle. Forked processes with a copy of it keep the lock."""
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
    # flock belongs to the open file, lockf to the process: with flock two runs in one process exclude each other.
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


_HELD: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _after_fork() -> None:
    """Close inherited handles: otherwise a forked worker keeps the lock of a killed run as long as it lives."""
    for lock in _HELD:
        lock.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
