"""A feed-forward layer that `accelerate(model)` takes, and how far its outputs may be from exact ones."""

from __future__ import annotations

from torch import nn

from saccade.acceleration._fused_layers import FusedLayer

WIDTH, HIDDEN = 192, 424


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def agree(out, exact, sums=2):
    """Rounding of sums of at most 424 terms, one after another."""
    exact = exact.double()
    allowed = sums * HIDDEN * 2.0**-24 * float(exact.abs().max())
    assert float((out - exact).abs().max()) <= allowed


def fused_in(model):
    return [value for part in model.modules() for value in vars(part).values() if isinstance(value, FusedLayer)]
