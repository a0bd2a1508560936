"""Batches of sequences of unequal length: padded, packed into one row, nested, and grouped by length.

Begin with `packing.py`. Imports masks alone.
"""

from __future__ import annotations

from .nesting import nested_like, packed_nested
from .packing import Packed, pack, pack_padded, unpack
from .padding import fill_padding, pad, positions_of, unpad
from .sampler import LengthGrouped, PaddingShare as PaddingShare

__all__ = [
    "LengthGrouped",
    "Packed",
    "fill_padding",
    "nested_like",
    "pack",
    "pack_padded",
    "packed_nested",
    "pad",
    "positions_of",
    "unpack",
    "unpad",
]
