"""The parts of a model that write into its residual stream, by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_NAMES = {"token": "token embedding", "position": "position embedding", "type": "token type embedding"}


class Component(NamedTuple):
    """A part of the model that writes into the residual stream.

    `kind` is "token", "position" or "type" (the parts of the embedding), "head", "feed_forward" or "biases"; of a layer
    without attention it is its path in the model. Heads and feed-forward layers have a `layer`, heads a `head`, both
    counted from 0; layers are counted by their attention calls.

    Example:
        >>> from saccade.attribution import Component
        >>> print(Component("head", layer=2, head=1), "|", Component("feed_forward", layer=0), "|", Component("token"))
        head 2.1 | feed-forward 0 | token embedding
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        if self.kind == "head":
            return f"head {self.layer}.{self.head}"
        return f"feed-forward {self.layer}" if self.kind == "feed_forward" else _NAMES.get(self.kind, self.kind)


TOKEN, POSITION, TYPE, BIASES = (Component(kind) for kind in ("token", "position", "type", "biases"))


def exact(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)
