"""The TensorBoard log: event files written synchronously, so that a full disk is noticed and a killed run loses no
entry before its last checkpoint."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG = "tensorboard"


def log_files(folder: Path) -> list[Path]:
    """Saccade's log files in the folder. TensorBoard's own writer ends its names with the host's."""
    name = re.compile(r"events\.out\.tfevents\.\d{10}\.\d{6}")
    return [path for path in folder.glob("events.*") if name.fullmatch(path.name)]


class ScalarLog:
    """Writes scalars by step to a new file of `folder`.

    The file begins with the mark by which TensorBoard drops later steps of earlier files: a resumed run shows each step
    once.

    Args:
        folder: created if it does not exist.
        step: the last finished step; all entries are of later ones.
        warn: called if the log cannot be written. The log ends then; training continues.
    """

    def __init__(self, folder: Path, step: int, warn: Callable[[str], None]):
        # TensorBoard is an extra. Its own writer runs in a thread, which delays errors.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]

        self._folder, self._warn = folder, warn
        earlier = bool(log_files(folder))  # a run that was killed before its first checkpoint starts again
        self._writer: Any = None
        self._attempt(self._open)
        self._event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if step or earlier:
            start = SessionLog(status=SessionLog.START)
            self._event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self.flush()

    def add(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        entries = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._event(Event(wall_time=time.time(), step=step, summary=Summary(value=entries)))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Same signature as SummaryWriter's, like the next two methods."""
        self.add(step, {tag: value})

    def add_histogram_raw(self, tag: str, *, global_step: int, **shape: Any) -> None:
        from torch.utils.tensorboard.summary import histogram_raw

        self._summary(global_step, histogram_raw(tag, **shape))

    def add_text(self, tag: str, text: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text as summary_of

        self._summary(step, summary_of(tag, text))

    def _summary(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._event(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self._attempt(lambda: self._writer.flush())

    def close(self) -> None:
        self._attempt(lambda: self._writer.close())
        self._writer = None

    def _open(self) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self._folder.mkdir(exist_ok=True)
        # Files are read in the order of their names.
        number = len(log_files(self._folder))
        path = self._folder / f"events.out.tfevents.{int(time.time()):010d}.{number:06d}"
        self._writer = RecordWriter(path.open("xb"))

    def _event(self, event: Any) -> None:
        self._attempt(lambda: self._writer.write(event.SerializeToString()))

    def _attempt(self, action: Callable[[], None]) -> None:
        if self._writer is None and action != self._open:
            return
        try:
            action()
        except OSError as error:
            self._warn(f"{self._folder}: the TensorBoard log could not be written ({error.strerror}) and ends here")
            if self._writer is not None:
                with contextlib.suppress(OSError):  # closing flushes, which fails again
                    self._writer.close()
            self._writer = None
