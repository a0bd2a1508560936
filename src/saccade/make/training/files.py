"""Checkpoints as files: written whole or not at all, recognised as damaged, and pruned.

A checkpoint is one file, so that a kill can never leave a mix of two steps: `torch.save`'s archive, then its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import torch

from ...support._whole_file import whole_file

SUFFIX = ".checkpoint"
KEEP = 2  # the newest, and one more in case it is damaged
_DIGEST = hashlib.sha256().digest_size


class DamagedCheckpoint(ValueError):
    """Not a whole checkpoint; the message names the file and what is wrong."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{step:09d}{SUFFIX}"


def checkpoints(folder: Path) -> list[Path]:
    """Those in the folder, the newest first."""
    ours = [path for path in folder.glob(f"*{SUFFIX}") if re.fullmatch(r"\d{9,}", path.stem) and path.is_file()]
    return sorted(ours, key=lambda path: int(path.stem), reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """What broken-off writes of checkpoints have left in the folder."""
    return [path for path in folder.glob(".*") if is_temporary(path, rf"\d{{9,}}{SUFFIX}")]


def is_temporary(path: Path, *names: str) -> bool:
    """Whether it is a file that was to take the name of one of `names`, regular expressions, and did not."""
    return path.is_file() and re.fullmatch(rf"\.(?:{'|'.join(names)})\.[a-z0-9_]{{8}}", path.name) is not None


def write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint; it is on the disk (fsync) before it gets its name, and its name is before this returns.

    Raises OSError, with the path and the reason, when it cannot be written; then all that was there is as it was.
    """
    path = checkpoint_path(folder, step)
    with whole_file(path, durable=True) as temporary, temporary.open("wb") as file:
        writer = _HashingWriter(file)
        try:
            torch.save(state, cast(IO[bytes], writer))
        except Exception as error:
            raise _cause(error, writer) from None
        file.write(writer.digest.digest())
    return path


def prune(folder: Path, keep: int = KEEP) -> None:
    """Remove all but the newest checkpoints, and what unfinished writes have left behind; nothing that is not ours."""
    remove([*checkpoints(folder)[keep:], *unfinished(folder)])


def remove(paths: Iterable[Path]) -> None:
    """Remove as many of the files as can be; then OSError for the first that could not."""
    errors = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


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


def _cause(error: BaseException, writer: _HashingWriter) -> BaseException:
    """What broke off `torch.save`, which ends its archive all the same and then complains about positions instead.

    A signal's exception can come where `write` is entered, before it can be remembered.
    """
    if writer.error is not None:
        return writer.error
    seen: BaseException | None = error
    while seen is not None and isinstance(seen, Exception):
        seen = seen.__context__
    return seen or error


class _HashingWriter:
    """Passes on what is written, and knows its hash and what first broke it off: an error, or Ctrl-C."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.digest = hashlib.sha256()
        self.error: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
            self.digest.update(data)
        except BaseException as error:
            self.error = self.error or error
            raise
        return len(data)

    def flush(self) -> None:
        self._file.flush()
