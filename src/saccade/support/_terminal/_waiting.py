"""A line on the terminal while a command has nothing to show yet: it loads PyTorch or a model, or it computes."""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

BEGIN = 1.0  # seconds without output until the line appears; help and usage errors take less


class WaitingLine:
    """Counts seconds on `stream`, if that is a terminal, until `end` is called; then the line is gone."""

    def __init__(self, stream: TextIO, begin: float | None = None):
        self._stream, self._begin = stream, BEGIN if begin is None else begin
        self._began = time.monotonic()
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._width = 0
        if stream.isatty() and os.environ.get("TERM") != "dumb" and os.environ.get("LOCAL_RANK", "0") == "0":
            threading.Thread(target=self._count, name="saccade-waiting", daemon=True).start()
        else:
            self._ended.set()

    def end(self) -> None:
        """Remove the line for good. To be called before anything is written to the terminal."""
        if not self._ended.is_set():
            with self._writing:
                self._ended.set()
                if self._width:
                    self._write("\r" + " " * self._width + "\r")

    def _count(self) -> None:
        pause = self._begin
        while not self._ended.wait(pause):
            with self._writing:
                if self._ended.is_set():
                    return
                text = f"working, {time.monotonic() - self._began:.0f} s"
                self._width = len(text)
                self._write("\r" + text)
            pause = 1.0

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed
            self._ended.set()
