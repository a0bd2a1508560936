"""What an encoder made of its sources, for the decoder that reads it.

Shape legend: B sources, Ls their length, T tokens as they are computed, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .token_layout import TokenLayout


@dataclass(frozen=True, eq=False)
class Memory:
    """What the encoder made of a batch of sources, for any number of calls of the decoder.

    Attributes:
        x: as it was computed, (1, T, E) where packed.
        layout: of the sources.
        hidden_states: each (B, Ls, E), where they were asked for.
    """

    x: Tensor
    layout: TokenLayout
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def last_hidden_state(self) -> Tensor:
        """(B, Ls, E), 0 in the padding."""
        return self.layout.put(self.x)
