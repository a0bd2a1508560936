"""Modules: attention, blocks, stacks, the encoder-decoder, and the caches they decode with.

Begin with `attention.py`, then `blocks.py` and `stacks.py`. Imports the operator, `positions`, `batching`, `variants`.
"""

from __future__ import annotations

from ._from_torch import from_torch
from ._linear import packed_weights
from ._to_torch import to_torch
from ._torch_masks import TranslatedMasks as TranslatedMasks, masks_from_torch
from .attention import MultiHeadAttention, Observation as Observation
from .blocks import Context, DecoderBlock, EncoderBlock
from .cache import (
    BlockSumsLayer as BlockSumsLayer,
    CachedInputs as CachedInputs,
    ContextLayer as ContextLayer,
    GrowingLayer as GrowingLayer,
    Int8Rows as Int8Rows,
    KVCache,
    LayerCache,
    RecurrentLayer as RecurrentLayer,
    StaticLayer as StaticLayer,
    StreamingLayer,
    WindowLayer,
)
from .config import AttentionConfig, BlockConfig
from .feed_forward import FeedForward
from .self_attention import SelfAttention
from .stacks import Decoder, Encoder
from .transformer import Transformer

__all__ = [
    "AttentionConfig",
    "BlockConfig",
    "Context",
    "Decoder",
    "DecoderBlock",
    "Encoder",
    "EncoderBlock",
    "FeedForward",
    "KVCache",
    "LayerCache",
    "MultiHeadAttention",
    "SelfAttention",
    "StreamingLayer",
    "Transformer",
    "WindowLayer",
    "from_torch",
    "masks_from_torch",
    "packed_weights",
    "to_torch",
]
