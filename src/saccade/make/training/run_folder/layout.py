"""The folder of a run: names of its files, and whether a run may write there.

A folder is recognised by files that only Saccade writes, and only files with Saccade's names are ever removed: a
mistyped `--out` never deletes other files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from pathlib import Path

from ...models import ModelConfig
from ...models.checkpoints.reading import read_json
from ...models.decoder_lm.checkpoint import CARD, CONFIG, HEADS, TOKENIZER, WEIGHTS
from ...models.model import COMPANIONS
from .checkpoint_files import checkpoints, is_temporary, remove, unfinished
from .lock import FileLock
from .scalars import LOG, log_files

FOLDER = "checkpoints"
CURVE, LAST, ANOMALY, TASK = "curve.jsonl", "last.safetensors", "anomaly.txt", "task.json"
VERDICT = "verdict.txt"
SEARCH, SEARCH_PICTURE = "search.json", "search.png"  # of a search, whose best run has a sub-folder
LANGUAGE = "lm"  # the task of folders and checkpoints that name none
_RUN = (CARD, CONFIG, HEADS, TOKENIZER, WEIGHTS, CURVE, LAST, ANOMALY, TASK, VERDICT, *COMPANIONS)
OURS = tuple(dict.fromkeys((*_RUN, SEARCH, SEARCH_PICTURE)))
_TRIED, _LOCK = ".saccade-can-write", ".saccade-lock"


def check_output(out: Path, overwrite: bool) -> None:
    """FileExistsError unless `out` is new, an empty folder, or a model folder with `overwrite`."""
    if out.is_dir():
        if not any(out.iterdir()):
            return
        if not overwrite:
            raise FileExistsError(
                f"out: {out} is not empty; expected a new or empty folder, or overwrite=True or resume=True"
            )
        if not is_ours(out):
            raise FileExistsError(f"{out}: not a model folder, so it is not overwritten; choose another --out")
    elif out.exists():
        raise FileExistsError(f"{out}: is a file, expected a folder to write the model into")


def check_barely_begun(out: Path) -> None:
    """FileExistsError if `out` has no checkpoint, but files that a run killed before its first one does not leave."""
    others = sorted(path.relative_to(out).as_posix() for path in _foreign_files(out))
    if others:
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise FileExistsError(f"{out}: has no checkpoint to resume from, only {listed}; {way_out(out)}")


def way_out(out: Path) -> str:
    """Advice for a folder that cannot be resumed."""
    if not out.is_dir() or not any(out.iterdir()):
        return "start the run without --resume"
    if not is_ours(out):
        return "choose another --out"
    anew = "replace what is there with --overwrite"
    return f"go on from its weights with --from {out} and another --out, or {anew}" if _has_model(out) else anew


def is_ours(out: Path) -> bool:
    """Whether the folder has a model or checkpoints of Saccade, or only the files of a run that has just begun."""
    folder = out / FOLDER
    known = _has_model(out) or (out / SEARCH).is_file()
    return known or bool(checkpoints(folder)) or (folder.is_dir() and not _foreign_files(out))


def unfinished_files(out: Path) -> list[Path]:
    """Temporary files of interrupted writes in the folder itself."""
    return [path for path in out.iterdir() if is_temporary(path, *map(re.escape, OURS))]


def lock_existing(out: Path, *, ours: bool) -> FileLock | None:
    """Lock a folder that a run has begun; with `ours`, any folder of Saccade's. None, and no change, for other folders.

    Raises:
        BlockingIOError: a run is writing there.
    """
    begun = (out / FOLDER).is_dir()
    return _locked(out) if begun and ((out / FOLDER / _LOCK).is_file() or (ours and is_ours(out))) else None


def make_folder(out: Path, lock: FileLock | None = None) -> FileLock:
    """Create the folder, lock it (unless `lock` is given), and check that it can be written before training starts.

    The folder of checkpoints marks a run that can be resumed, so both folders appear at once.

    Raises:
        BlockingIOError: a run is writing there.
    """
    try:
        if not out.exists():
            _appear(out)
        (out / FOLDER).mkdir(exist_ok=True)
        lock = _locked(out) if lock is None else lock
        tried = out / FOLDER / _TRIED
        tried.write_text("can be written\n")
        tried.unlink()
    except BlockingIOError:
        raise
    except OSError as error:
        raise OSError(f"{out}: cannot be written ({error.strerror})") from None
    return lock


def check_still_new(out: Path) -> None:
    """FileExistsError if another run wrote to the folder between `check_output` and the lock."""
    if _foreign_files(out):
        raise FileExistsError(f"{out}: another run has just written there; choose another --out, or give --overwrite")


def clear(out: Path) -> None:
    """Remove checkpoints and logs of an earlier run."""
    remove([*checkpoints(out / FOLDER), *unfinished(out / FOLDER), *log_files(out / LOG)])
    with contextlib.suppress(OSError):  # it does not exist, or is not empty
        (out / LOG).rmdir()


def task_of(out: Path) -> str | None:
    """The task of the model in a run's folder; None without a model of Saccade."""
    try:
        named = read_json(out / TASK)["task"]
    except (OSError, ValueError, TypeError, KeyError):
        named = LANGUAGE
    if named == LANGUAGE:  # its folders have no task.json
        return LANGUAGE if _has_language_model(out) else None
    return named if isinstance(named, str) else None


def _has_model(out: Path) -> bool:
    return task_of(out) is not None


def _has_language_model(out: Path) -> bool:
    try:
        # Models of other libraries have a config.json and a tokenizer.json with other fields.
        ModelConfig.from_dict(read_json(out / CONFIG))
    except (OSError, ValueError, TypeError):
        return False
    return (out / TOKENIZER).is_file()


def _foreign_files(out: Path) -> list[Path]:
    """Files that neither a run that has just begun nor an interrupted write has created."""
    folder, log = out / FOLDER, out / LOG
    inside = [path for part in (folder, log) if part.is_dir() for path in part.iterdir()]
    known = {*(part for part in (folder, log) if part.is_dir()), folder / _TRIED}
    known |= {folder / _LOCK, *unfinished_files(out), *unfinished(folder), *log_files(log)}
    return [path for path in (*out.iterdir(), *inside) if path not in known]


def _locked(out: Path) -> FileLock:
    try:
        return FileLock(out / FOLDER / _LOCK)
    except BlockingIOError:
        raise BlockingIOError(
            f"{out}: another run is writing there; wait for its end, or choose another --out"
        ) from None


def _appear(out: Path) -> None:
    _make_parent(out.parent)
    new = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    (new / FOLDER).mkdir()
    new.chmod(0o755)
    try:
        new.rename(out)
    except OSError:
        (new / FOLDER).rmdir()
        new.rmdir()
        if not out.is_dir():  # it is, if another run created it in the meantime
            raise


def _make_parent(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
