"""One attention call, checked and in one form: what every backend receives.

Shape legend, everywhere: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D key width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._biases import Bias, Placement
from ._dropout import Dropout
from ._masks import Mask


@dataclass(frozen=True)
class Call:
    query: Tensor  # (B, Hq, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    sink: Tensor | None  # (Hq,)
    dropout: Dropout | None
    needs_lse: bool = False

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def length_q(self) -> int:
        return self.query.shape[2]

    @property
    def length_k(self) -> int:
        return self.key.shape[2]

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def accumulator(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def placement(self) -> Placement:
        """Query row i of this call stands at key index `i + placement`, an int or one per item (B,).

        This is for biases: their own placement, else the mask's, else bottom-right.
        """
        if self.bias is not None and self.bias.offset is not None:
            return self.bias.offset
        placement = None if self.mask is None else self.mask._placement()
        return _standing(placement, self.length_k - self.length_q, self.device)

    def tensors(self) -> list[Tensor]:
        """Every tensor that may carry a derivative."""
        given = [self.query, self.key, self.value, self.sink, None if self.bias is None else self.bias.parameter]
        return [tensor for tensor in given if tensor is not None]


def _standing(placement: Any, unplaced: int, device: torch.device) -> Placement:
    """What a mask's placement says about row i: it stands at key index `i + result`."""
    if placement is None or placement == "open":
        return unplaced
    if placement[0] == "at":
        offset = placement[1]
        at: Placement = offset if isinstance(offset, int) else offset.on(device)
        return at
    _, rows, keys, lengths, inner = placement
    if lengths is None and (inner is None or inner == "open"):
        raise ValueError(
            "bias: the mask is a slice that does not say where its queries stand; "
            "give mask.slice(..., lengths=(Lq, Lk)) or place the bias, bias.at(offset)"
        )
    whole = 0 if lengths is None else lengths[1] - lengths[0]
    shift: int = rows[0] - keys[0]
    return shift + _standing(inner, whole, device)


def add_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Give the sink its share of the denominator: it is one more part, with output 0 and lse `sink`.

    Args:
        out: (B, Hq, Lq, Dv) without the sink, accumulator dtype.
        lse: (B, Hq, Lq), -inf on empty rows.
        sink: (Hq,) or None.
    """
    if sink is None:
        return out, lse
    sink = sink.to(lse.dtype)[None, :, None].expand_as(lse)
    empty = lse == float("-inf")
    safe = torch.where(empty, sink, lse)  # keeps -inf - -inf out of the derivative
    whole = torch.where(empty, sink, torch.logaddexp(safe, sink))
    return out * torch.exp(safe - whole)[..., None], whole
