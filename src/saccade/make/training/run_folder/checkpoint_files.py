"""Checkpoint files: written atomically, checked for damage, and pruned.

A checkpoint is one file, so that a kill never leaves a mix of two steps: `torch.save`'s archive, then its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import torch

from ....support._whole_file import whole_file

SUFFIX = ".checkpoint"
KEEP = 2  # the newest, and one more in case it is damaged
_DIGEST = hashlib.sha256().digest_size


class DamagedCheckpoint(ValueError):
    """A file that is not a whole checkpoint. The message names the file and the damage."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"{step:09d}{SUFFIX}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    ours = [path for path in folder.glob(f"*{SUFFIX}") if re.fullmatch(r"\d{9,}", path.stem) and path.is_file()]
    return sorted(ours, key=lambda path: int(path.stem), reverse=True)


def unfinished(folder: Path) -> list[Path]:
    """Temporary files of interrupted writes of checkpoints."""
    return [path for path in folder.glob(".*") if is_temporary(path, rf"\d{{9,}}{SUFFIX}")]


def is_temporary(path: Path, *names: str) -> bool:
    """Whether the file is a temporary one of an interrupted write to a name that matches one of `names` (regexes)."""
    return path.is_file() and re.fullmatch(rf"\.(?:{'|'.join(names)})\.[a-z0-9_]{{8}}", path.name) is not None


def write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint. The file is on disk (fsync) before it gets its name, and the name before this returns.

    Raises OSError with the path and the reason if writing fails; existing files are unchanged then.
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
    """Remove all but the newest checkpoints, and temporary files of interrupted writes."""
    remove([*checkpoints(folder)[keep:], *unfinished(folder)])


def remove(paths: Iterable[Path]) -> None:
    """Remove every file that can be removed, then raise the first OSError."""
    errors = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, without running code from the file. Raises DamagedCheckpoint or OSError."""
    content = path.read_bytes()
    body, digest = content[:-_DIGEST], content[-_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise DamagedCheckpoint(f"{path}: damaged, its checksum does not fit ({len(content):,} bytes)")
    try:
        return torch.load(io.BytesIO(body), weights_only=True, map_location="cpu")
    except Exception as error:
        raise DamagedCheckpoint(f"{path}: not a checkpoint ({str(error).splitlines()[0]})") from None


def _cause(error: BaseException, writer: _HashingWriter) -> BaseException:
    """The original error of a failed `torch.save`, which finishes its archive and then raises an error about positions.

    A signal's exception may be raised on entry to `write`, before the writer can record it.
    """
    if writer.error is not None:
        return writer.error
    cause: BaseException | None = error
    while cause is not None and isinstance(cause, Exception):
        cause = cause.__context__
    return cause or error


class _HashingWriter:
    """Passes data on to a file, hashes it and records the first exception, such as a full disk or Ctrl-C."""

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
