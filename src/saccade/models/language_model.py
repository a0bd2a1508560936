"""A decoder-only language model.

Shapes: B batch, L length, E model width, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import AttentionConfig, BlockConfig, Decoder, KVCache
from ..nn.stacks import LayerObserver
from ..positions import RotaryConfig
from .config import ModelConfig


class DecoderLM(nn.Module):
    """Predicts the next token at every position: tokens (B, L) int64 -> logits (B, L, V).

    Token embedding, a `saccade.nn.Decoder` (pre-norm RMSNorm, rotary positions, SwiGLU), and a head that is the
    embedding's transpose (Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017).

    The decoder starts as in `saccade.nn`: by fan-in. Embeddings start with variance 1 / E and are multiplied by sqrt(E)
    on the way in (Vaswani et al. 2017, section 3.4), so tokens enter with variance 1 and logits leave with it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        attention = AttentionConfig(
            config.width, config.heads, kv_heads=config.kv_heads, positions=RotaryConfig(config.rotary_base)
        )
        self.decoder = Decoder(BlockConfig(attention, hidden=config.hidden, dropout=config.dropout), config.layers)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None, observe: LayerObserver | None = None) -> Tensor:
        """Logits of the token after each one. With a cache, `tokens` continue those in it.

        `observe(layer, observation)` is called in each layer with what goes into attention and what comes out.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens: expected shape (batch, length), got {tuple(tokens.shape)}")
        length = tokens.shape[1] + (0 if cache is None else cache.length)
        if length > self.config.context:
            raise ValueError(f"tokens: {length} are more than the model's context of {self.config.context}")
        x = self.dropout(self.embedding(tokens) * self.config.width**0.5)
        x = self.decoder(x, cache=cache, observe=observe)
        return F.linear(x, self.embedding.weight)

    def cache(self) -> KVCache:
        """An empty cache for this model."""
        return self.decoder.cache()

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
