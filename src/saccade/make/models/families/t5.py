"""T5: text to text. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
(2020); version 1.1, Flan-T5 and mT5 with a gated feed-forward layer (Shazeer 2020) and a head of its own.

The block with its norm first and no bias anywhere: x = x + attention(norm(x)), and so on; RMS norms. Logits are not
divided by sqrt(D). Positions are a bias on the logits of self-attention, from one table for all layers of a stack:

    softmax(q k^T + table[bucket(j - i), h]) v

Shape legend: T tokens as they are computed, E width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ....operator.nn import AttentionConfig, BlockConfig, Decoder, Encoder
from ....operator.positions import Offset, T5Config
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Model, Request
from ..text.encoder import TextEncoder
from ..text.encoder_decoder import EncoderDecoder, NextTokenHead
from ..token_layout import TokenLayout
from ..tokenizers.sentencepiece import SentencePieceTokenizer, open_either
from ..tokenizers.text import TextTokenizer

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
GATED = {"relu": "reglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "silu": "swiglu"}
PROJECTIONS = {
    **{name: (False, name) for name in ACTIVATIONS},
    **{f"gated-{name}": (True, name) for name in GATED},
    "gated-gelu": (True, "gelu_new"),  # the published name means the formula with tanh
}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
HEADS = {"conditional-generation": "ForConditionalGeneration", "encoder": "EncoderModel"}


class T5(EncoderDecoder):
    """T5 with its head, or only its body. The length is not limited."""

    longest = None
    target_tokens = None

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        block = t5_block(settings, request)
        cross = replace(block.attention, positions=None, mechanism=None, dropout=block.dropout)
        causal = replace(block.attention, positions=_positions(settings, bidirectional=False))
        layers = settings.layers("num_layers", 6)
        self.start = settings.get("decoder_start_token_id", settings.count("pad_token_id", 0, least=0))
        self.tokens = nn.Embedding(settings.count("vocab_size", 32128), block.width)
        self.encoder = Encoder(block, layers)
        decoder = replace(block, attention=causal, cross=cross)
        self.decoder = Decoder(decoder, settings.layers("num_decoder_layers", layers))
        self.dropout = nn.Dropout(block.dropout)
        self.head = None
        if request.head is not None:
            # Version 1.1 has a head of its own and does not scale; newer configurations name only the scaling. mT5 is
            # of version 1.1, whatever they say.
            tied = settings.flag("tie_word_embeddings", True)
            named = settings.flag(
                "scale_decoder_outputs", tied if "scale_decoder_outputs" not in settings.values else False
            )
            scaled = named and settings.get("model_type") == "t5"
            own = not scaled and "lm_head.weight" in settings.stored
            self.head = NextTokenHead(self.tokens, tied=not own, scale=block.width**-0.5 if scaled else 1.0)

    def embed_source(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.tokens(input_ids))

    def embed_target(self, input_ids: Tensor, offset: Offset) -> Tensor:
        return self.dropout(self.tokens(input_ids))

    def finished(self, x: Tensor) -> Tensor:
        return self.dropout(x)


class T5Encoder(TextEncoder):
    """Only T5's encoder: hidden states of texts."""

    longest = None
    head = None

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        block = t5_block(settings, request)
        self.tokens = nn.Embedding(settings.count("vocab_size", 32128), block.width)
        self.encoder = Encoder(block, settings.layers("num_layers", 6))
        self.dropout = nn.Dropout(block.dropout)

    @cached_property
    def tokenizer(self) -> TextTokenizer | SentencePieceTokenizer:  # type: ignore[override]
        """The tokenizer of the whole model."""
        return super().tokenizer if self.folder is None else open_either(self.folder, self.longest)

    def embed(
        self, input_ids: Tensor, layout: TokenLayout, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        for name, given in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if given is not None:
                raise ValueError(f"{name}: T5 has none")
        return self.dropout(self.tokens(layout.take(input_ids)))


def t5_block(settings: CheckpointSettings, request: Request) -> BlockConfig:
    """The encoder's block."""
    t5 = settings.get("model_type") == "t5"
    dropout = settings.share("dropout_rate", 0.1)
    attention = AttentionConfig(
        settings.count("d_model", 512),
        settings.count("num_heads", 8),
        head_width=settings.count("d_kv", 64),
        scale=1.0,
        positions=_positions(settings, bidirectional=True),
        dropout=request.weight_dropout(settings, "dropout_rate", 0.1),
        mechanism=request.mechanism,
    )
    return BlockConfig(
        attention,
        hidden=settings.count("d_ff", 2048),
        activation=_activation(settings, "relu" if t5 else "gated-gelu"),
        dropout=dropout,
        feed_forward_dropout=dropout,
        eps=settings.eps("layer_norm_epsilon", 1e-6),
    )


def _activation(settings: CheckpointSettings, usual: str) -> str:
    """The activation by `feed_forward_proj`, unless its parts, `is_gated_act` and `dense_act_fn`, are given too."""
    gated, name = settings.choice("feed_forward_proj", PROJECTIONS, usual)
    return settings.choice("dense_act_fn", GATED if settings.flag("is_gated_act", gated) else ACTIVATIONS, name)


def _positions(settings: CheckpointSettings, *, bidirectional: bool) -> T5Config:
    buckets = settings.count("relative_attention_num_buckets", 32)
    return T5Config(buckets, settings.count("relative_attention_max_distance", 128), bidirectional)


def _build(settings: CheckpointSettings, request: Request) -> Model:
    return T5Encoder(settings, request) if request.head == "encoder" else T5(settings, request)


def _stack(side: str, feed_forward: int, *, gated: bool) -> tuple[Key, ...]:
    """The key map of encoder or decoder; its feed-forward layer is published as number 1 or 2 of each block."""
    ours, layer = f"{side}.blocks.{{n}}", f"{side}.block.{{n}}.layer"
    up: tuple[Any, ...] = ("gate_up", ("wi_0", "wi_1")) if gated else ("up", ("wi",))
    inner = f"{layer}.{feed_forward}.DenseReluDense"
    return (
        Key(f"{side}.positions.table", f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        Key(f"{ours}.attention.projection", tuple(f"{layer}.0.SelfAttention.{part}" for part in "qkv")),
        Key(f"{ours}.attention.output", f"{layer}.0.SelfAttention.o"),
        Key(f"{ours}.attention_norm", f"{layer}.0.layer_norm"),
        Key(f"{ours}.feed_forward.{up[0]}", tuple(f"{inner}.{part}" for part in up[1])),
        Key(f"{ours}.feed_forward.down", f"{inner}.wo"),
        Key(f"{ours}.feed_forward_norm", f"{layer}.{feed_forward}.layer_norm"),
        Key(f"{side}.norm", f"{side}.final_layer_norm"),
    )


CROSS = "decoder.block.{n}.layer.1"
CROSS_KEYS = (
    Key("decoder.blocks.{n}.cross.query", f"{CROSS}.EncDecAttention.q"),
    Key("decoder.blocks.{n}.cross.key", f"{CROSS}.EncDecAttention.k"),
    Key("decoder.blocks.{n}.cross.value", f"{CROSS}.EncDecAttention.v"),
    Key("decoder.blocks.{n}.cross.output", f"{CROSS}.EncDecAttention.o"),
    Key("decoder.blocks.{n}.cross_norm", f"{CROSS}.layer_norm"),
)


def _keys(model: T5 | T5Encoder) -> KeyMap:
    gated = model.encoder.config.activation in GATED.values()
    shared = Key("tokens", "shared", also=("encoder.embed_tokens", "decoder.embed_tokens"))
    encoder = (shared, *_stack("encoder", 1, gated=gated))
    same = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tied = dict.fromkeys((*same, "lm_head.weight"), "shared.weight")
    if isinstance(model, T5Encoder):
        return KeyMap(encoder, tied=dict.fromkeys(same, "shared.weight"), unused=("decoder", "lm_head"))
    return KeyMap(
        (*encoder, *_stack("decoder", 2, gated=gated), *CROSS_KEYS),
        (Key("head.out", "lm_head"),),
        tied=tied,
        # A table that early checkpoints carry and no version of the model reads.
        derived=(f"{CROSS}.EncDecAttention.relative_attention_bias".replace("{n}", "0"),),
        unused=("lm_head",) if model.head is None else (),
    )


FAMILY = Family("T5", {"t5": "T5", "mt5": "MT5"}, HEADS, _build, _keys, aliases=ALIASES)
