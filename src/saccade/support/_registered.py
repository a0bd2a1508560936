"""Parts that lower parts use without importing them: `saccade` registers each under a name when it is imported."""

from __future__ import annotations

TYPE_CHECKING = False  # not from `typing`, which `import saccade` does without
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_parts: dict[str, Callable[[], object]] = {}


def register(**parts: Callable[[], object]) -> None:
    """Register functions that import a part, by the name that `registered` takes."""
    _parts.update(parts)


def registered(name: str) -> Any:
    """The part of this name, imported now."""
    return _parts[name]()


def picture(name: str, result: object) -> str:
    """`result` as drawn by the viewer's function `name`: a page, a frame for a notebook, or text."""
    return str(getattr(registered("viewer"), name)(result))
