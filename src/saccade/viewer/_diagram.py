"""The door to the diagrams: what draws them is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diagrams import Diagram


def diagram(source: Any = None, kind: str | None = None, **how: Any) -> Diagram:
    """A picture of a module, from its shapes and numbers; arguments as `saccade.viewer.diagrams.diagram`."""
    from .diagrams import diagram as draw

    return draw(source, kind, **how)
