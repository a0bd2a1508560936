"""The parts that a residual stream is a sum of."""

from __future__ import annotations

from typing import NamedTuple

_NAMES = {"token": "token embedding", "position": "position embedding", "type": "token type embedding"}


class Component(NamedTuple):
    """A part of the model that writes into the residual stream.

    `kind` is "token", "position" or "type" (the parts of the embedding), "head", "feed_forward" or "biases". Heads and
    feed-forward layers have a `layer`, heads a `head`, both counted from 0.

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
