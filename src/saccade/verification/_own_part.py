"""The part of a decoder layer that attends to the queries' own sequence, with a context that stays the same.

Shapes: B batch, L length, E width of the context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._reading import Reading

_LENGTH = 19  # of the context, whatever the input's: a mask of the own sequence fits nothing else


@dataclass(frozen=True)
class WithContext:
    """Calls the target with a context of random numbers, the same for each batch item and in each call."""

    name: str | None  # None: by place
    width: int
    is_sequence_first: bool
    call: Any = None

    def __call__(self, target: Any, *places: Any, **keywords: Any) -> Any:
        first = next(one for one in (*places, *keywords.values()) if isinstance(one, Tensor))
        context = self._context(first)
        if self.name is None:
            places = (*places[:1], context, *places[1:])
        else:
            keywords[self.name] = context
        return target(*places, **keywords) if self.call is None else self.call(target, *places, **keywords)

    def _context(self, first: Tensor) -> Tensor:
        batch = first.shape[1 if self.is_sequence_first else 0]
        generator = torch.Generator().manual_seed(7)
        drawn = torch.randn(1, _LENGTH, self.width, generator=generator).to(first.device, first.dtype)
        drawn = drawn.expand(batch, -1, -1)
        return (drawn.transpose(0, 1) if self.is_sequence_first else drawn).contiguous()


def own_part(reading: Reading) -> Reading:
    """Of form "cross" with the context filled in: form "self", with the masks of the queries' own sequence."""
    name = reading.names[1] if reading.names else None
    call = WithContext(name, reading.context_width or reading.width, reading.layout == "LBD", reading.call)
    return replace(
        reading, form="self", masks=reading.own_masks, own_masks=(), names=reading.names[:1], context_width=None,
        weights=None, cache=None, call=call,
    )  # fmt: skip
