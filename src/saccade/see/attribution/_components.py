"""The parts of a model that write into its residual stream, by name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_NAMES = {
    **{"token": "token embedding", "position": "position embedding", "type": "token type embedding"},
    **{"head": "head", "cross_attention": "cross-attention head", "feed_forward": "feed-forward"},
}


class Component(NamedTuple):
    """A part of the model that writes into the residual stream.

    `kind` is "token", "position" or "type" (the parts of the embedding), "head", "cross_attention" (a head that reads
    the source), "feed_forward" or "biases"; of a layer without attention it is its path in the model. Heads and
    feed-forward layers have a `layer`, heads a `head`, both counted from 0; layers are counted by their attention
    calls, those of cross-attention separately.

    Example:
        >>> from saccade.attribution import Component
        >>> print(Component("head", layer=2, head=1), "|", Component("feed_forward", layer=0), "|", Component("token"))
        head 2.1 | feed-forward 0 | token embedding
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        place = ".".join(str(number) for number in (self.layer, self.head) if number is not None)
        return f"{_NAMES.get(self.kind, self.kind)} {place}".strip()


HEADS = ("head", "cross_attention")
TOKEN, POSITION, TYPE, BIASES = (Component(kind) for kind in ("token", "position", "type", "biases"))


def exact(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)
