"""The encoder-decoder.

Shape legend: B batch, Ls / Lt lengths of source and target, E model width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .._masks import Mask, Padding, as_mask
from .._unknown_arguments import advised
from ..positions import T5Config
from .cache import KVCache
from .config import BlockConfig
from .stacks import Decoder, Encoder, LayerObserver


class Transformer(nn.Module):
    """Encoder and decoder: source (B, Ls, E) and target (B, Lt, E) -> (B, Lt, E).

        memory = encoder(source),   out = decoder(target, context=memory)

    Vaswani et al., "Attention Is All You Need" (2017), figure 1, between the embeddings and the last linear layer.
    There are three patterns: the source sees all of itself, the target sees itself up to each token, and the target
    sees all of the source. Padding on either side is never attended to.

    Args:
        config: of the blocks of both; the decoder's `cross` is `config.cross`, or like `config.attention` without
            positions and window where that is None. `T5Config` becomes one-directional in the decoder.
        layers: how many blocks each, or (encoder's, decoder's).
        decoder: of the decoder's blocks where they differ; None is `config`.
        final_norm: as in `Encoder`, for both.
        checkpointing: as in `Encoder`, for both.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.Transformer(saccade.nn.BlockConfig(saccade.nn.AttentionConfig(16, heads=4)), layers=2)
        >>> model(torch.randn(2, 7, 16), torch.randn(2, 5, 16), source_padding=saccade.Padding([7, 4])).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        config: BlockConfig,
        layers: int | tuple[int, int],
        *,
        decoder: BlockConfig | None = None,
        final_norm: bool | None = None,
        checkpointing: bool = False,
    ):
        super().__init__()
        many = (layers, layers) if isinstance(layers, int) else tuple(layers)
        if len(many) != 2:
            raise ValueError(f"layers: expected an int or (encoder's, decoder's), got {layers}")
        of_decoder = _with_cross(_one_way(config) if decoder is None else decoder, config.width)
        of_encoder = replace(config, cross=None)
        self.encoder = Encoder(of_encoder, many[0], final_norm=final_norm, checkpointing=checkpointing)
        self.decoder = Decoder(of_decoder, many[1], final_norm=final_norm, checkpointing=checkpointing)

    @advised
    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Mask | Tensor | None = None,
        target_mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        *,
        source_padding: Padding | None = None,
        target_padding: Padding | None = None,
        observe: LayerObserver | None = None,
    ) -> Tensor:
        """Encode `source`, and decode `target` with the result as context.

        Args:
            source: (B, Ls, E).
            target: (B, Lt, E).
            source_mask: among source tokens; None shows everything.
            target_mask: among target tokens, which see nothing later in any case (`decoder.causal`).
            context_mask: of the source, as targets see it; None shows everything.
            source_padding, target_padding: the real tokens of each.
            observe: as in `Decoder`, for the decoder's layers; the encoder's are observed in `encode`.

        Returns:
            (B, Lt, E).
        """
        paddings: dict[str, Any] = dict(source_padding=source_padding, target_padding=target_padding)
        _check_paddings(**paddings)
        memory = self.encode(source, source_mask, padding=source_padding)
        return self.decode(target, memory, target_mask, context_mask, observe=observe, **paddings)

    def encode(self, source: Tensor, mask: Mask | Tensor | None = None, *, padding: Padding | None = None) -> Tensor:
        """The memory (B, Ls, E) that `decode` reads."""
        return self.encoder(source, mask, padding=padding)

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        *,
        source_padding: Padding | None = None,
        target_padding: Padding | None = None,
        cache: KVCache | None = None,
        observe: LayerObserver | None = None,
    ) -> Tensor:
        """Targets (B, Lt, E) to (B, Lt, E); with a cache they continue those in it, and memory is projected once."""
        _check_paddings(source_padding=source_padding, target_padding=target_padding)
        across = across_padding(source_padding, target_padding, memory)
        if across is not None:
            context_mask = across if context_mask is None else across & as_mask(context_mask)
        read: dict[str, Any] = dict(context=memory, context_mask=context_mask, padding=target_padding)
        return self.decoder(target, mask, cache=cache, observe=observe, **read)

    def reset_parameters(self) -> None:
        """Draw all weights anew, as they were drawn at first."""
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()

    def cache(self, dtype: str | None = None) -> KVCache:
        """An empty cache for `decode`; `dtype` as in `Decoder.cache`."""
        return self.decoder.cache(dtype)


def across_padding(source: Padding | None, target: Padding | None, memory: Tensor) -> Mask | None:
    """Real targets see real source tokens."""
    if source is None and target is None:
        return None
    keys = Padding([memory.shape[1]] * memory.shape[0]) if source is None else source
    return keys.replaced(queries=None if target is None else target.keys)


def _one_way(config: BlockConfig) -> BlockConfig:
    """The configuration for a decoder, whose T5 buckets all cover tokens before the query (Raffel et al. 2020)."""
    scheme = config.attention.positions
    if not isinstance(scheme, T5Config):
        return config
    return replace(config, attention=replace(config.attention, positions=replace(scheme, bidirectional=False)))


def _check_paddings(**paddings: object) -> None:
    for name, padding in paddings.items():
        if padding is not None and not isinstance(padding, Padding):
            raise TypeError(f"{name}: expected saccade.Padding, got {type(padding).__name__}")


def _with_cross(config: BlockConfig, width: int) -> BlockConfig:
    if config.cross is not None:
        return config
    cross = replace(config.attention, positions=None, window=None, context_width=width, values_width=width)
    return replace(config, cross=cross)
