"""The door to the diagrams: what draws them is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diagrams import Diagram


def diagram(source: Any = None, kind: str | None = None, **how: Any) -> Diagram:
    """Draw a module, from its shapes and numbers; arguments and errors are those of `saccade.viewer.diagrams.diagram`.

    Example:
        >>> import saccade
        >>> layer = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> diagram = saccade.diagram(saccade.nn.EncoderBlock(saccade.nn.BlockConfig(layer.config)))
        >>> diagram  # notebooks show it; diagram.save("block.svg") writes a file
        <Diagram block: Encoder block of EncoderBlock>
    """
    from .diagrams import diagram as draw

    return draw(source, kind, **how)
