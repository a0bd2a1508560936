"""The viewer's server: answers requests of a page or a notebook from kept queries and keys.

Begin with `_view.py`, then `_session.py` (the operations). Imports `maps`; starlette, uvicorn and anywidget only when a
viewer opens.
"""

from __future__ import annotations

from ._serve import MOST_IDLE, OTHERS, Viewer
from ._view import open_session, start, view

__all__ = ["MOST_IDLE", "OTHERS", "Viewer", "open_session", "start", "view"]
