"""A file that gives the browser the viewer's address, so that the token is in no program's arguments.

A browser gets the address as an argument, and every user of a machine may read the arguments of all programs. So
it gets the path of a file that only this user can read, and the page in it redirects to the address.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from html import escape
from pathlib import Path

LIFE = 120.0  # seconds; the browser may have to start first
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>Saccade</title>
<p><a href="{url}">The viewer</a></p>
</html>
"""


class AddressFile:
    """A page that redirects to ``url``, until it is removed, or `LIFE` has passed and `expire` is called.

    A killed process leaves it, with an address that no longer answers.
    """

    def __init__(self, url: str):
        self._url = url
        self._folders: list[tuple[float, Path]] = []

    def write(self) -> Path | None:
        """The page, in a new folder that only this user can enter; None if the home folder is not the user's own.

        The folder is in the home folder itself: browsers packaged as snaps see neither hidden folders nor the system's
        temporary one. In another user's folder it could be replaced.
        """
        try:
            home = Path.home()
            if home.stat().st_uid != os.getuid():
                return None
            folder = Path(tempfile.mkdtemp(prefix="saccade-viewer-", dir=home))  # mode 0700
            self._folders.append((time.monotonic() + LIFE, folder))
            path = folder / "open.html"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(PAGE.format(url=escape(self._url)))
        except (OSError, RuntimeError):  # no home, or it is not writable
            return None
        return path

    def expire(self) -> None:
        """Remove files that browsers have read by now."""
        self._remove(time.monotonic())

    def remove(self) -> None:
        self._remove(float("inf"))

    def _remove(self, now: float) -> None:
        for due in [entry for entry in self._folders if entry[0] <= now]:
            self._folders.remove(due)
            shutil.rmtree(due[1], ignore_errors=True)
