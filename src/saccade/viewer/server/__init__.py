"""The viewer: what a page or a notebook asks for, answered from kept queries and keys.

Begin with `_view.py`, then `_session.py` (the operations). Imports `maps`; starlette, uvicorn and anywidget only when a
viewer opens.
"""

from __future__ import annotations

from ._serve import Viewer
from ._view import view

__all__ = ["Viewer", "view"]
