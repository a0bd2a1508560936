"""The parts that a residual stream is a sum of."""

from __future__ import annotations

from typing import NamedTuple

_NAMES = {"token": "token embedding", "position": "position embedding", "type": "token type embedding"}


class Component(NamedTuple):
    """What writes into the residual stream.

    `kind` is "token", "position" or "type" (the embedding's parts), "head", "feed_forward" or "biases". Heads and
    feed-forward layers have a `layer`, heads a `head`, both counted from 0.
    """

    kind: str
    layer: int | None = None
    head: int | None = None

    def __str__(self) -> str:
        if self.kind == "head":
            return f"head {self.layer}.{self.head}"
        return f"feed-forward {self.layer}" if self.kind == "feed_forward" else _NAMES.get(self.kind, self.kind)


TOKEN, POSITION, TYPE, BIASES = (Component(kind) for kind in ("token", "position", "type", "biases"))
