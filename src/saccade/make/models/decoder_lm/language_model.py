"""`DecoderLM`, a decoder-only language model.

Shape legend: B batch, L length, E model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....operator._masks import Padding
from ....operator.nn import BlockConfig, Decoder, KVCache
from ....operator.nn._fewer_heads import kept_heads
from ....operator.nn.stacks import LayerObserver
from ..pruned_heads import attention_layers, keep_heads
from .config import ModelConfig

_FEW = 16  # vocabulary size below which the logit of the input token adds to the loss


class DecoderLM(nn.Module):
    """A language model that predicts the next token at every position: tokens (B, L) int64 -> logits (B, L, V).

        x = sqrt(E) W[tokens],   logits = decoder(x) W^T,   W the embedding (V, E)

    Token embedding, a `saccade.nn.Decoder` (pre-norm RMSNorm, rotary positions, SwiGLU), and tied output weights:
    the transposed embedding (Press and Wolf, "Using the Output Embedding to Improve Language Models", 2017).

    The decoder is initialised by fan-in, as in `saccade.nn`. Embeddings are multiplied by sqrt(E) at the input (Vaswani
    et al. 2017, section 3.4) and start with standard deviation E ** -0.75. So the logit of the input token starts near
    1 at every width, and the loss near log V; with E ** -0.5 that logit grows like sqrt(E), and the model repeats its
    input. A logit m adds m ** 2 / 2V to the loss (to second order) and is proportional to the variance of the
    embedding. Below 16 tokens the variance is multiplied by sqrt(V / 16), so that this adds no more than with 16
    tokens.

    Example:
        >>> import torch, saccade
        >>> config = saccade.models.ModelConfig(vocabulary=11, width=8, layers=2, heads=2, context=16)
        >>> model = saccade.models.DecoderLM(config)
        >>> model(torch.tensor([[0, 3, 5, 7]])).shape
        torch.Size([1, 4, 11])
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        block = BlockConfig(config.attention(), hidden=config.hidden, dropout=config.dropout)
        self.decoder = Decoder(block, config.layers)
        if config.pruned_heads is not None:
            left = [kept_heads(removed, config.heads) for removed in config.pruned_heads]
            keep_heads(self.decoder, dict(zip(attention_layers(self.decoder).values(), left, strict=True)))
        few = min(1.0, config.vocabulary / _FEW) ** 0.25
        nn.init.normal_(self.embedding.weight, std=few * config.width**-0.75)

    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Padding | None = None,
        cache: KVCache | None = None,
        observe: LayerObserver | None = None,
        hidden_states: list[Tensor] | None = None,
    ) -> Tensor:
        """Logits of the token after each one.

        Args:
            tokens: (B, L) int64; with a cache, they continue the tokens in it.
            padding: marks real tokens; padding may be on either side. Logits at padding are undefined.
            cache: from `cache()`, or any `KVCache` with as many layers.
            observe: `observe(layer, observation)` is called in each layer with inputs and output of attention.
            hidden_states: a list to which the input of each layer and the output of the last one are appended.

        Raises:
            ValueError: another rank, or more tokens than the context; with a `StreamingLayer`, whose positions do not
                grow, a window larger than the context.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens: expected shape (batch, length), got {tuple(tokens.shape)}")
        length = _reached(cache, tokens.shape[1])
        if length > self.config.context:
            raise ValueError(f"tokens: {length} are more than the model's context of {self.config.context}")
        x = self.dropout(self.embedding(tokens) * self.config.width**0.5)
        x = self.decoder(x, padding=padding, cache=cache, observe=observe, hidden_states=hidden_states)
        return F.linear(x, self.embedding.weight)

    def cache(self, dtype: str | None = None) -> KVCache:
        """An empty cache for this model; `dtype` as in `Decoder.cache`."""
        return self.decoder.cache(dtype)

    def next_logits(self, ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        """Logits (B, V) of the token after the last column. `ids (B, L)` continue the tokens in the cache.

        `attention_mask (B, L)` is 1 for real tokens and 0 for padding; None: all are real.
        """
        padding = None if attention_mask is None else Padding(attention_mask != 0)
        return self(ids, padding=padding, cache=cache)[:, -1]

    def parameter_count(self) -> int:
        """Number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def _reached(cache: KVCache | None, length: int) -> int:
    """Number of positions after this call: cached and new tokens; when compiling, the new tokens alone."""
    return length if cache is None or torch.compiler.is_compiling() else cache.reach(length)
