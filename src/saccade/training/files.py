"""Checkpoints as files: written whole or not at all, recognised as damaged, and pruned.

A checkpoint is one file, so that a kill can never leave a mix of two steps: `torch.save`'s archive, then its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch

SUFFIX = ".checkpoint"
KEEP = 2  # the newest, and one more in case it is damaged
_DIGEST = hashlib.sha256().digest_size


class DamagedCheckpoint(ValueError):
    """Not a whole checkpoint; the message names the file and what is wrong."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{step:09d}{SUFFIX}"


def checkpoints(folder: Path) -> list[Path]:
    """Those in the folder, the newest first."""
    return sorted(folder.glob(f"[0-9]*{SUFFIX}"), reverse=True)


def write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint and drop all but the newest two.

    It is on the disk (fsync) before it gets its name, and has its name on the disk before an old one goes. Raises
    OSError, with the path and the reason, when it cannot be written; then all that was there is as it was.
    """
    path = checkpoint_path(folder, step)
    with durable_file(path) as file:
        writer = _HashingWriter(file)
        try:
            torch.save(state, cast(IO[bytes], writer))
        except Exception:
            # torch.save wraps what its file raises in a complaint about positions.
            if writer.error is not None:
                raise OSError(writer.error.errno, writer.error.strerror, str(path)) from None
            raise
        file.write(writer.digest.digest())
    prune(folder)
    return path


def prune(folder: Path, keep: int = KEEP) -> None:
    """Remove all but the newest checkpoints, and what unfinished writes have left behind."""
    for path in [*checkpoints(folder)[keep:], *folder.glob(".*")]:
        path.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was written. Loading runs no code from the file. Raises DamagedCheckpoint, or OSError."""
    content = path.read_bytes()
    body, digest = content[:-_DIGEST], content[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedCheckpoint(f"{path}: damaged, its checksum does not fit ({len(content):,} bytes)")
    try:
        return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    except Exception as error:
        raise DamagedCheckpoint(f"{path}: not a checkpoint ({str(error).splitlines()[0]})") from None


@contextlib.contextmanager
def durable_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path`, on the disk, once the block has ended without an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    # Windows opens no folders; there a rename is as durable as it gets.
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class _HashingWriter:
    """Passes on what is written, and knows its hash and the first error."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.digest.update(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()
