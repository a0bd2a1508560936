"""Position-wise feed-forward layers.

Shapes: B batch, L length, E model width, F hidden width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`, (B, L, E) -> (B, L, E). Shazeer, "GLU Variants Improve Transformer" (2020).

    Args:
        width: E.
        hidden: F; None is 8/3 of the width (as many parameters as a plain layer four times as wide), rounded up to a
            multiple of 32.
    """

    def __init__(self, width: int, hidden: int | None = None):
        super().__init__()
        hidden = default_hidden(width) if hidden is None else hidden
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def default_hidden(width: int) -> int:
    return -(-8 * width // (3 * 32)) * 32
