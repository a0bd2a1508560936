"""How many keys each row sees, without forming Lq x Lk.

Shape legend: B items, H heads, Lq / Lk lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._biases import TensorBias
from .._call import Call

_ROWS, _KEYS = 256, 4096


def keys_seen(call: Call) -> Tensor:
    """int64 (B|1, H|1, Lq|1): how many keys the mask, and the -inf of a bias tensor, leave to each row."""
    Lq, Lk, mask = call.length_q, call.length_k, call.mask
    bias = call.bias.parameter.detach() if isinstance(call.bias, TensorBias) else None
    if mask is None and bias is None:
        return torch.full((1, 1, 1), Lk, device=call.device)
    blocks = [torch.zeros(1, 1, 0, dtype=torch.int64, device=call.device)]
    for start in range(0, Lq, _ROWS):
        blocks.append(_block(call, bias, (start, min(start + _ROWS, Lq))))
    shape = torch.broadcast_shapes(*(block.shape[:2] for block in blocks))
    return torch.cat([block.expand(*shape, -1) for block in blocks], 2)


def _block(call: Call, bias: Tensor | None, rows: tuple[int, int]) -> Tensor:
    Lq, Lk, mask = call.length_q, call.length_k, call.mask
    total = torch.zeros(1, 1, rows[1] - rows[0], dtype=torch.int64, device=call.device)
    for start in range(0, Lk, _KEYS):
        keys = (start, min(start + _KEYS, Lk))
        kind = "full" if mask is None else mask._kind(rows, keys, Lq, Lk)
        seen = torch.full((1, 1, 1, keys[1] - keys[0]), kind == "full", device=call.device)
        if kind == "partial":
            assert mask is not None
            indices = (torch.arange(*span, device=call.device) for span in (rows, keys))
            seen = mask._bits(*indices, Lq, Lk)
        if bias is not None:
            seen = seen & (_cut(_cut(bias, 2, rows), 3, keys) != -torch.inf)
        total = total + seen.sum(-1)
    return total


def _cut(tensor: Tensor, dim: int, span: tuple[int, int]) -> Tensor:
    return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, span[0], span[1] - span[0])
