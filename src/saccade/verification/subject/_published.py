"""Models of `saccade.models` with published weights as subjects.

Shape legend: B batch, L length.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...make.models import Model
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ...make.models.text.encoder_decoder import EncoderDecoder
from ._reading import CacheReading, MaskReading, Reading

PublishedText = TextEncoder | TextDecoder | EncoderDecoder
MASK = MaskReading("attention_mask", "BK", "attend", "int64")


def published_reading(model: PublishedText, assumed: tuple[str, ...] = ()) -> Reading:
    """How its tokens are given: the decoder's of an encoder-decoder."""
    stack: Any = model.encoder if isinstance(model, TextEncoder) else model.decoder
    layers = [block.attention.config for block in stack.blocks]
    per_token = model.request.head in ("masked-lm", "causal-lm", "conditional-generation")
    cached = isinstance(model, TextDecoder | EncoderDecoder)
    return Reading(
        "tokens",
        "BL",
        0,
        layers[0].heads,
        layers[0].kv_heads or layers[0].heads,
        names=() if isinstance(model, EncoderDecoder) else ("input_ids",),
        out="logits" if per_token else "last_hidden_state",
        masks=(MASK,),
        vocabulary=model.tokens.num_embeddings,
        max_length=model.longest,
        windows=frozenset(None if one.window is None else one.window.left for one in layers),
        assumed=assumed,
        cache=CacheReading("made", "cache", make=model.cache) if cached else None,
    )


def stack_of(model: Model) -> nn.Module | None:
    """The stack of a model that reads images, sound or series: what it reads is embedded already."""
    stack = getattr(model, "encoder", None)
    return stack if isinstance(stack, nn.Module) and not isinstance(model, PublishedText) else None
