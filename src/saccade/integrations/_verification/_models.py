"""Models of `saccade.models` as subjects.

Shape legend: B batch, L length.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...make.models import DecoderLM, LanguageModel, Model, TransformersModel
from ...make.models.text.decoder import TextDecoder
from ...make.models.text.encoder import TextEncoder
from ...make.models.text.encoder_decoder import EncoderDecoder
from ...operator._masks import Padding
from ...verification import Promise, Undecided
from ...verification.subject._reading import CacheReading, MaskReading, Reading
from ...verification.subject._subject import Subject
from ...verification.subject._token_models import DECODER_TOKENS, EncoderDecoderModel, TokenModel, with_direction

_Text = TextEncoder | TextDecoder | EncoderDecoder


class SaccadeDecoder(TokenModel):
    """A `DecoderLM` whose padding is a mask (B, L), True = real."""

    model: DecoderLM

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Tensor:
        padding = None if attention_mask is None else Padding(attention_mask.bool())
        return self.model(tokens, padding=padding, cache=cache)


def is_text_model(target: Any) -> bool:
    """Whether `text_subject` accepts the target."""
    return isinstance(target, LanguageModel | DecoderLM | _Text)


def inner_of(model: Any) -> tuple[nn.Module, str] | None:
    """The module to check in place of a model, and a description: transformers' own, or the stack of a model that reads
    images, sound or series, whose inputs are embedded already."""
    name = type(model).__name__
    if isinstance(model, TransformersModel):
        return model.module, f"what is checked is the module of transformers inside {name}"
    stack = getattr(model, "encoder", None) if isinstance(model, Model) and not isinstance(model, _Text) else None
    said = f"what is checked is the stack of {name}, which reads embedded inputs"
    return (stack, said) if isinstance(stack, nn.Module) else None


def text_subject(model: Any, promise: Promise) -> Subject:
    """A language model, or a published model of text, as a subject of form "tokens".

    Raises:
        Undecided: a model that makes its decoder's tokens itself.
    """
    model = model.model if isinstance(model, LanguageModel) else model
    if isinstance(model, DecoderLM):
        return _decoder(model, promise)
    model = model.eval()
    stack: Any = model.encoder if isinstance(model, TextEncoder) else model.decoder
    scales = {block.attention.config.scale for block in stack.blocks}
    if promise.scale is None and len(scales) == 1:
        promise = replace(promise, scale=scales.pop())
    if not isinstance(model, EncoderDecoder):
        return Subject(model, _reading(model, stack), with_direction(promise, isinstance(model, TextDecoder)))
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        raise Undecided(
            f"{type(model).__name__} makes its decoder's tokens from its encoder's, so they cannot be tested "
            'separately: load the folder with head="none"'
        )
    names, masks = ("input_ids", "decoder_input_ids"), ("attention_mask", "decoder_attention_mask")
    whole = EncoderDecoderModel(model, names, masks, model.tokens.num_embeddings)
    return Subject(whole, _reading(model, stack), with_direction(promise, True))


def _decoder(model: DecoderLM, promise: Promise) -> Subject:
    reading = Reading(
        "tokens",
        "BL",
        0,
        model.config.heads,
        model.config.kv_heads,
        vocabulary=model.config.vocabulary,
        masks=(MaskReading("attention_mask", "BK", "attend"),),
        max_length=model.config.context,
        cache=CacheReading("made", "cache", make=model.cache),
    )
    return Subject(SaccadeDecoder(model), reading, with_direction(promise, True))


def _reading(model: _Text, stack: Any) -> Reading:
    layers = [block.attention.config for block in stack.blocks]
    per_token = model.request.head in ("masked-lm", "causal-lm", "conditional-generation")
    is_pair = isinstance(model, EncoderDecoder)
    return Reading(
        "tokens",
        "BL",
        0,
        layers[0].heads,
        layers[0].kv_heads or layers[0].heads,
        names=() if is_pair else ("input_ids",),
        out="logits" if per_token else "last_hidden_state",
        masks=(MaskReading("attention_mask", "BK", "attend", "int64"),),
        vocabulary=model.tokens.num_embeddings,
        max_length=model.longest,
        windows=frozenset(None if layer.window is None else layer.window.left for layer in layers),
        assumed=DECODER_TOKENS if is_pair else (),
        cache=None if isinstance(model, TextEncoder) else CacheReading("made", "cache", make=model.cache),
    )
