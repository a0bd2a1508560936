"""Writing results without losing anything: checked before the work, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_OURS = (
    b'<meta name="generator" content="Saccade',
    b"Software\x00Saccade",
    b"<dc:title>Saccade",
    b'<testsuites name="saccade',
)


def check_target(path: str | Path, *, force: bool = False) -> Path:
    """The file that will be written, after any link; raises ValueError or OSError now rather than after the work.

    A file that Saccade made may be replaced; any other existing file only with ``force``.
    """
    target = Path(path).expanduser().resolve()
    if not target.parent.is_dir():
        raise ValueError(f"cannot write {path}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder")
    if target.exists() and not target.is_file():
        raise ValueError(f"cannot write {path}: it is not an ordinary file")
    if target.exists() and not force and not _is_ours(target):
        raise ValueError(f"{path} exists and was not made by Saccade; --force replaces it, --out writes elsewhere")
    try:
        _temporary(target).unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    return target


def write_whole(target: Path, content: bytes) -> None:
    """Put ``content`` at ``target`` in one step, so that nobody ever sees half of it."""
    temporary = _temporary(target)
    try:
        temporary.write_bytes(content)
        temporary.chmod(_mode(target))
        temporary.replace(target)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:50]}.", dir=target.parent)
    os.close(handle)
    return Path(name)


def _mode(target: Path) -> int:
    if target.exists():
        return target.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            beginning = file.read(8192)
    except OSError:
        return False
    return any(mark in beginning for mark in _OURS)
