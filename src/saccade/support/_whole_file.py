"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary path next to `path`, which replaces `path` after the block has ended without an error.

    The file keeps the permissions of the one it replaces. `durable` waits until the disk has it.

    Raises:
        OSError: with `path` as its file name.
    """
    temporary = None
    try:
        temporary = temporary_file(path)
        yield temporary
        if durable:
            _wait_for_disk(temporary, os.O_RDWR)
        temporary.chmod(_permissions(path))
        temporary.replace(path)
        if durable and hasattr(os, "O_DIRECTORY"):  # Windows opens no folders; its renames are as durable as they get
            _wait_for_disk(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def temporary_file(path: Path) -> Path:
    """An empty file beside `path`, whose name begins with a point and the name of `path`."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    os.close(handle)
    return Path(name)


def _wait_for_disk(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _permissions(path: Path) -> int:
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
