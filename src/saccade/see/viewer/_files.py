"""Writing result files: targets are checked before the work, and files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from ...support._whole_file import temporary_file, whole_file

_OURS = (
    b'<meta name="generator" content="Saccade',
    b"Software\x00Saccade",
    b"<dc:title>Saccade",
    b'data-generator="Saccade"',
    b'<testsuites name="saccade',
    b"/Creator (Saccade)",
)


def check_target(path: str | Path, *, force: bool = False) -> Path:
    """Check before the work that a file can be written, and return its path with links resolved.

    A file that Saccade made may be replaced. Any other existing file needs ``force``.

    Raises:
        ValueError: no such folder, not an ordinary file, a file that Saccade did not make, or one that cannot be
            written.
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
        temporary_file(target).unlink()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None
    return target


def write_whole(target: Path, content: bytes) -> None:
    """Write ``content`` to ``target`` in one step: readers never see a partial file.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with whole_file(target) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror or error}") from None


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            beginning = file.read(8192)
            # A PDF names its maker at its end, before the table of its objects.
            end = file.read()[-65536:] if beginning.startswith(b"%PDF") else b""
    except OSError:
        return False
    return any(mark in beginning + end for mark in _OURS)
