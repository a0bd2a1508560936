"""Whole models with the call that checks use, and readings of their signatures and settings.

Shape legend: B batch, L length, S source length, E model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ._reading import MaskReading, Promise

DECODER_TOKENS = ("the tokens are the decoder's; its encoder reads the same few for every item",)
_SOURCE_LENGTH = 6


class TokenModel(nn.Module):
    """A model of token numbers called in one way: `forward(tokens, ...)`, tokens (B, L); `model` is the user's own."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model


class WithTargets(TokenModel):
    """A model that gives every position's logits only where targets are given, as nanoGPT's does."""

    def __init__(self, model: nn.Module, argument: str):
        super().__init__(model)
        self.argument = argument

    def forward(self, tokens: Tensor) -> Any:
        return self.model(tokens, **{self.argument: tokens.contiguous()})  # which its loss may view(-1)


class EncoderDecoderModel(TokenModel):
    """An encoder-decoder as its decoder: `tokens` go to the decoder.

    `source` (B, S) goes to the encoder; without one every item is given the same few tokens.
    """

    def __init__(self, model: nn.Module, names: tuple[str, str], masks: tuple[str | None, str | None], vocabulary: int):
        super().__init__(model)
        self.names, self.masks = names, masks  # (the encoder's, the decoder's)
        generator = torch.Generator().manual_seed(7)
        low = min(4, vocabulary - 1)
        self.register_buffer(
            "source", torch.randint(low, vocabulary, (1, _SOURCE_LENGTH), generator=generator), persistent=False
        )

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        **more: Any,
    ) -> Any:
        own: Any = self.source
        source = own.expand(len(tokens), -1) if source is None else source
        given = {self.names[0]: source, self.names[1]: tokens, **more}
        for name, mask in zip(self.masks, (source_mask, attention_mask), strict=True):
            if mask is not None and name is not None:
                mask = mask.expand(len(tokens), -1)
                # nn.Transformer's name and meaning: True = padding
                given[name] = ~mask.bool() if name.endswith("key_padding_mask") else mask
        return self.model(**given)


class PatchModel(nn.Module):
    """A vision model from its embedded patches on: x (B, L, E) takes the place of what its embeddings give.

    No positions are added then, and any number of patches can be given.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def pixels(self, batch: int, seed: int = 0) -> Tensor:
        """(B, channels, height, width), standard normal."""
        config: Any = self.model.config
        sides = config.image_size if isinstance(config.image_size, (list, tuple)) else (config.image_size,) * 2
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((batch, config.num_channels, *sides), generator=generator, dtype=torch.float64)
        first = next(self.model.parameters())
        return drawn.to(first.device, first.dtype)

    def forward(self, x: Tensor) -> Any:
        model: Any = self.model
        with model.embeddings.register_forward_hook(lambda *_: x):
            return model(pixel_values=self.pixels(len(x)))


def named(taken: Any, options: tuple[str, ...]) -> str | None:
    """The first of `options` that is among the arguments `taken`."""
    return next((name for name in options if name in taken), None)


def padding_masks(taken: Any, dtype: str = "int64") -> tuple[MaskReading, ...]:
    return (MaskReading("attention_mask", "BK", "attend", dtype),) if "attention_mask" in taken else ()


def with_direction(promise: Promise, said: bool | None) -> Promise:
    return promise if promise.causal is not None or said is None else replace(promise, causal=said)


def longest_input(module: nn.Module) -> int | None:
    """The smallest limit of the length in its configuration, its attributes or its tables of positions; None if there
    is none."""
    config: Any = getattr(module, "config", None)
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "block_size")]
    limits += [getattr(module, name, None) for name in ("max_len", "max_length", "block_size", "context_length")]
    for name, part in module.named_modules():
        of_text = not any(other in name for other in ("vision", "image", "visual", "audio"))
        if isinstance(part, nn.Embedding) and of_text and ("pos" in name.lower() or name.endswith("wpe")):
            # RoBERTa counts positions from behind its padding index.
            limits.append(part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1))
    return min((value for value in limits if isinstance(value, int) and value > 0), default=None)
