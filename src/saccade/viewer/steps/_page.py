"""The page of steps: one HTML file that needs nothing else, not even a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...inspection import Steps


def render_page(steps: Steps) -> str:
    raise NotImplementedError


def framed_page(steps: Steps) -> str:
    raise NotImplementedError
