"""Pictures of results. Results do not know the part that draws them: `saccade` names it here, when it is imported."""

from __future__ import annotations

TYPE_CHECKING = False  # not from `typing`, which `import saccade` does without
if TYPE_CHECKING:
    from collections.abc import Callable

_parts: list[Callable[[], object]] = []


def draw_with(part: Callable[[], object]) -> None:
    """From now on results are drawn by what `part()` gives, a module that is imported when a picture is wanted."""
    _parts[:] = [part]


def picture(name: str, result: object) -> str:
    """What the function `name` of the part that draws makes of `result`: a page, a frame for a notebook, or text."""
    [part] = _parts
    return str(getattr(part(), name)(result))
