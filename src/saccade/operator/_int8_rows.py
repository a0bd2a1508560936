"""Keys and values in 8 bits: whole numbers, and a scale for each row.

Shape legend: B batch, H heads, L rows, W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
_LEAST = torch.finfo(torch.float32).tiny  # of a scale: smaller ones would lose digits, or be 0


class Int8Rows:
    """Keys or values (B, H, L, W) in 8 bits, as a cache of `dtype="int8"` hands them to attention.

        row = whole numbers from -127 to 127 times the row's scale,   scale = max |x| / 127

    Each entry is off by at most half a scale. A row with NaN or an infinity has the scale NaN, and reads NaN. Numbers
    beyond float32 count as infinite.

    `saccade.attention` reads at most 32 query rows for each key head from the bytes themselves; any other function of
    the operator gets `floats`, a copy.

    Args:
        data: int8 (B, H, L, W + 4), in each row the whole numbers and behind them the four bytes of a float32, the
            scale. One tensor, so that a row moves as a whole, and is read as a whole.

    Example:
        >>> import torch, saccade
        >>> rows = saccade.nn.Int8Rows.of(torch.tensor([[[[0.5, -1.27, 0.0]]]]))
        >>> rows.shape, rows.data.shape
        (torch.Size([1, 1, 1, 3]), torch.Size([1, 1, 1, 7]))
        >>> rows.floats(torch.float32)
        tensor([[[[ 0.5000, -1.2700,  0.0000]]]])
    """

    def __init__(self, data: Tensor):
        batch, heads, rows, size = data.shape
        self.data, self.shape = data, torch.Size((batch, heads, rows, size - SCALE_BYTES))

    @classmethod
    def of(cls, x: Tensor) -> Int8Rows:
        """Floats (B, H, L, W) of any dtype, rounded; without a graph."""
        x = x.detach().float()
        scale = (torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True) / 127).clamp_(min=_LEAST)
        scale.nan_to_num_(nan=torch.nan, posinf=torch.nan)
        whole = (x / scale).round_().nan_to_num_(0.0).to(torch.int8)
        return cls(torch.cat((whole, scale.flatten().view(torch.int8).view(*x.shape[:3], SCALE_BYTES)), -1))

    def floats(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the rows stand for, (B, H, L, W) in that dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        whole, scale = self.data.split((self.shape[3], SCALE_BYTES), -1)
        scale = scale.clone(memory_format=torch.contiguous_format)  # a view of floats must begin at a multiple of 4
        scale = scale.flatten().view(torch.float32).view(*self.shape[:3], 1)
        return (whole.to(wide) * scale.to(wide)).to(dtype)


def as_floats(rows: Tensor | Int8Rows, dtype: torch.dtype) -> Tensor:
    """A tensor as it is, rows in 8 bits as floats."""
    return rows.floats(dtype) if isinstance(rows, Int8Rows) else rows
