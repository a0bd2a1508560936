"""GPT-Neo: a decoder of text. Black et al., "GPT-Neo: Large Scale Autoregressive Language Modeling with
Mesh-Tensorflow" (2021).

GPT-2's block, with layers in turn that see everything before and layers that see a window of it; dot products are not
divided by sqrt(D), and queries, keys and values have no biases.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ....operator._masks import Window
from ....operator.nn import AttentionConfig, BlockConfig, Decoder
from ....operator.positions import Learned, Offset
from ..checkpoints.keys import KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..text.decoder import TextDecoder
from .bert import ACTIVATIONS
from .gpt2 import decoder_head, decoder_keys, gpt_keys

HEADS = {"causal-lm": "ForCausalLM", "sequence-classification": "ForSequenceClassification"}
ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
LAYERS = {"global": False, "local": True}  # whether there is a window


class GPTNeo(TextDecoder):
    """GPT-Neo with the head of a language model, a classifier of its last token, or none."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        width, dropout = settings.count("hidden_size", 2048), settings.share("resid_dropout", 0.0)
        attention = AttentionConfig(
            width,
            settings.count("num_heads", 16),
            output_bias=True,
            scale=1.0,
            dropout=request.weight_dropout(settings, "attention_dropout", 0.0),
            mechanism=request.mechanism,
        )
        block = BlockConfig(
            attention,
            hidden=settings.count("intermediate_size", 4 * width),
            activation=settings.choice("activation_function", ACTIVATIONS, "gelu_new"),
            norm="layer",
            dropout=dropout,
            bias=True,
            eps=settings.eps("layer_norm_epsilon", 1e-5),
        )
        local = replace(block, attention=replace(attention, window=Window(settings.count("window_size", 256) - 1, 0)))
        self.longest = settings.count("max_position_embeddings", 2048)
        self.tokens = nn.Embedding(settings.count("vocab_size", 50257), width)
        self.places = Learned(self.longest, width)
        self.dropout = nn.Dropout(settings.share("embed_dropout", 0.0))
        self.decoder = Decoder([local if windowed else block for windowed in _windowed(settings)])
        self.tied = settings.flag("tie_word_embeddings", True)
        self.head = decoder_head(settings, request, self.tokens, tied=self.tied)

    def embed(self, input_ids: Tensor, offset: Offset) -> Tensor:
        return self.dropout(self.places(self.tokens(input_ids), offset))


def _windowed(settings: CheckpointSettings) -> list[bool]:
    """Which layers see a window: `attention_types` is [[["global", "local"], 12]] for 24 layers. `attention_layers`
    names the kind of each, and overrides it."""
    layers = settings.layers("num_layers", 24)
    types: Any = settings.get("attention_types", [[["global", "local"], 12]])
    try:
        kinds = [kind for kinds, times in types for _ in range(min(int(times), layers + 1)) for kind in kinds]
        found = [LAYERS[kind] for kind in kinds]
    except (TypeError, ValueError, KeyError):
        found = []
    if len(found) != layers:
        raise settings.error("attention_types", f"[[[kinds], times], ...] with {layers} of 'global' and 'local' in all")
    named: Any = settings.get("attention_layers", kinds)
    if not isinstance(named, list) or len(named) != layers or not all(kind in (*LAYERS,) for kind in named):
        raise settings.error("attention_layers", f"'global' or 'local' for each of {layers} layers")
    return [LAYERS[kind] for kind in named]


def _keys(model: GPTNeo) -> KeyMap:
    layer = "h.{n}.attn.attention"
    body = gpt_keys(tuple(f"{layer}.{part}_proj" for part in "qkv"), f"{layer}.out_proj")
    derived = (f"{layer}.bias", f"{layer}.masked_bias")
    return decoder_keys(model.request.head, body, prefix="transformer.", tied=model.tied, derived=derived)


FAMILY = Family("GPT-Neo", {"gpt_neo": "GPTNeo"}, HEADS, GPTNeo, _keys, ("sequence-classification",), aliases=ALIASES)
