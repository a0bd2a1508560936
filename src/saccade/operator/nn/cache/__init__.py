"""Caches: the keys and values of the tokens a model has seen, so that new tokens do not project the old ones again."""

from __future__ import annotations

from ..._int8_rows import Int8Rows
from .block_sums import BlockSumsLayer
from .context import ContextLayer
from .growing import GrowingLayer
from .layer import CachedInputs, LayerCache
from .layers import KVCache
from .recurrent import RecurrentLayer
from .static import StaticLayer
from .streaming import StreamingLayer
from .window import WindowLayer

__all__ = [
    "BlockSumsLayer",
    "CachedInputs",
    "ContextLayer",
    "GrowingLayer",
    "Int8Rows",
    "KVCache",
    "LayerCache",
    "RecurrentLayer",
    "StaticLayer",
    "StreamingLayer",
    "WindowLayer",
]
