"""One run at a time in a folder: a lock that the system holds for a process, so that a killed run leaves none.

What a killed run leaves is the file, which says nothing: who locks it has it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


class FileLock:
    """The lock on a file, taken as it is made; `close` gives it up and removes the file.

    Two in one process are two, and forked processes do not hold it.

    Args:
        path: the file; it is made, and its folder has to be there.

    Attributes:
        failure: why the system has no lock for this file, None if it has one: some file systems of networks.

    Raises:
        BlockingIOError: another one holds it. OSError: the file cannot be made.
    """

    def __init__(self, path: Path):
        import filelock  # of an extra, which `import saccade.training` does without

        self.failure: str | None = None
        self._path = path
        path.touch()  # before the lock: what fails after it is a system without locks
        self._lock = filelock.FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise BlockingIOError(f"{path}: locked by another process") from None
        except (OSError, NotImplementedError) as error:
            self.failure = getattr(error, "strerror", None) or str(error)

    def close(self) -> None:
        """Give it up."""
        if not self._lock.is_locked and self.failure is None:
            return
        with contextlib.suppress(OSError):  # Windows removes no open file
            self._path.unlink()  # while it is held: a file made later by this name is another run's
        self._lock.release()
