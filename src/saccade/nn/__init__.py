"""Modules: multi-head attention, decoder blocks, and the cache they decode with."""

from __future__ import annotations

from .attention import MultiHeadAttention
from .cache import KVCache, LayerCache
from .decoder import Decoder, DecoderBlock
from .feed_forward import SwiGLU

__all__ = ["Decoder", "DecoderBlock", "KVCache", "LayerCache", "MultiHeadAttention", "SwiGLU"]
