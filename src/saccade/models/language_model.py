"""A decoder-only language model.

Shapes: B batch, L length, E model width, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..nn import Decoder, DecoderBlock, KVCache
from ..nn.decoder import LayerObserver
from .config import ModelConfig


class DecoderLM(nn.Module):
    """Predicts the next token at every position: tokens (B, L) int64 -> logits (B, L, V).

    Token embedding, a `saccade.nn.Decoder` (pre-norm RMSNorm, rotary positions, SwiGLU), and a head that is the
    embedding's transpose (Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017).

    Initialisation: normal with standard deviation fan_in ** -0.5, so that attention logits start with a variance near 1
    (a fixed 0.02 leaves narrow models with nearly uniform heads, which then take long to become anything else); divided
    by sqrt(2 layers) for the two matrices of each block that write into the residual stream, so that its variance does
    not grow with depth (Radford et al., GPT-2, 2019). Embeddings are multiplied by sqrt(E) on the way in (Vaswani et
    al. 2017, section 3.4), so tokens enter with variance 1 and logits leave with it.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.decoder = Decoder(
            config.width,
            config.layers,
            config.heads,
            kv_heads=config.kv_heads,
            hidden=config.hidden,
            dropout=config.dropout,
            rotary_base=config.rotary_base,
        )
        self._initialise()

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None, observe: LayerObserver | None = None) -> Tensor:
        """Logits of the token after each one. With a cache, `tokens` continue those in it.

        `observe(layer, query, key, value, mask)` is called in each layer with what goes into `saccade.attention`.
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
        return KVCache(self.config.layers)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):  # both weights have their fan-in last
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        for block in self.decoder.modules():
            if isinstance(block, DecoderBlock):
                for last in (block.attention.output, block.feed_forward.down):
                    nn.init.normal_(last.weight, std=(2 * self.config.layers * last.in_features) ** -0.5)
