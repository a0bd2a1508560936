"""BART: an encoder-decoder of text. Lewis et al., "BART: Denoising Sequence-to-Sequence Pre-training for Natural
Language Generation, Translation, and Comprehension" (2020).

The block of Vaswani et al. (2017) with its norm last, x = norm(x + f(x)), and biases everywhere; learned positions that
stand two rows further down their table; a norm right after the embedding; GELU. One embedding serves encoder, decoder
and head, whose logits have a stored bias.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ....operator.nn import AttentionConfig, BlockConfig, Decoder, Encoder
from ....operator.nn.stacks import LayerObserver
from ....operator.positions import Learned, Offset
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..inputs import check_ids
from ..model import Family, Model, Request
from ..output import ModelOutput
from ..output_heads import Classifier, ItemHead
from ..text.encoder_decoder import EncoderDecoder, NextTokenHead
from ..token_layout import token_layout
from .bert import ACTIVATIONS as GELUS

ACTIVATIONS = {**GELUS, "swish": "silu"}
HEADS = {
    "conditional-generation": "ForConditionalGeneration",
    "sequence-classification": "ForSequenceClassification",
}
ALIASES = {
    "num_attention_heads": "encoder_attention_heads",
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
}
SKIPPED = 2  # rows of a table of positions before that of the first token


class Bart(EncoderDecoder):
    """BART with the head that gives the next token, or its body alone."""

    target_tokens = None
    start: int

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        settings.only("normalize_embedding", True)
        settings.only("static_position_embeddings", False)
        self.encoder, self.decoder = bart_stacks(settings, request)
        width = self.encoder.config.width
        self.longest = settings.count("max_position_embeddings", 1024)
        self.start = settings.count("decoder_start_token_id", 2, least=0)
        self.scale = width**0.5 if settings.flag("scale_embedding", False) else 1.0
        vocabulary = settings.count("vocab_size", 50265)
        pad = settings.token("pad_token_id", 1, vocabulary)
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=pad)
        self.source_places = Learned(self.longest + SKIPPED, width)
        self.target_places = Learned(self.longest + SKIPPED, width)
        self.source_norm, self.target_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(self.encoder.config.dropout)
        self.head = bart_head(settings, request, self.tokens)

    def embed_source(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.source_places(self.tokens(input_ids) * self.scale, positions + SKIPPED)
        return self.dropout(self.source_norm(x))

    def embed_target(self, input_ids: Tensor, offset: Offset) -> Tensor:
        x = self.target_places(self.tokens(input_ids) * self.scale, offset + SKIPPED)
        return self.dropout(self.target_norm(x))


class BartClassifier(Bart):
    """BART that reads a text twice, with encoder and decoder; the decoder's state at the end token gives its class."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__(settings, request)
        self.end = settings.count("eos_token_id", 2, least=0)
        width, dropout = self.encoder.config.width, settings.share("classifier_dropout", 0.0)
        self.head = ItemHead(Classifier(width, request.labels, dropout, torch.tanh), settings.get("problem_type"))

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        hidden_states: bool = False,
        observe: LayerObserver | None = None,
    ) -> ModelOutput:
        """Logits (B, K) of a batch of texts; arguments as in `EncoderDecoder.forward`, labels (B,) or (B, K).

        Raises:
            TypeError, ValueError: as there; an item without an end token.
        """
        memory = self.encode(input_ids, attention_mask, hidden_states=hidden_states, observe=observe)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        first = token_layout(*check_ids("input_ids", input_ids, self.tokens.num_embeddings), attention_mask).ends[0]
        begun = torch.where(columns == first.to(columns.device)[:, None], self.start, input_ids.roll(1, 1))
        ends = (input_ids == self.end) if attention_mask is None else (input_ids == self.end) & (attention_mask != 0)
        if not bool(ends.any(1).all()):
            item = int((~ends.any(1)).nonzero()[0])
            raise ValueError(f"input_ids: item {item} has no end token {self.end}, which stands for the whole text")
        last = (ends * columns).argmax(1)
        x, layout, states = self._decode(begun, attention_mask, memory, None, hidden_states, observe)
        assert self.head is not None
        return ModelOutput(
            last_hidden_state=layout.put(x),
            hidden_states=states,
            encoder_last_hidden_state=memory.last_hidden_state,
            encoder_hidden_states=memory.hidden_states,
            **self.head(layout.at(x, last), labels),
        )


def bart_stacks(settings: CheckpointSettings, request: Request) -> tuple[Encoder, Decoder]:
    """Encoder and decoder of BART and Marian, which differ before and after them."""
    width = settings.count("d_model", 1024)

    def block(side: str) -> BlockConfig:
        attention = AttentionConfig(
            width,
            settings.count(f"{side}_attention_heads", 16),
            bias=True,
            dropout=request.weight_dropout(settings, "attention_dropout", 0.0),
            mechanism=request.mechanism,
        )
        exact = replace(attention, mechanism=None, dropout=settings.share("attention_dropout", 0.0))
        return BlockConfig(
            attention,
            exact if side == "decoder" else None,
            hidden=settings.count(f"{side}_ffn_dim", 4096),
            activation=settings.choice("activation_function", ACTIVATIONS, "gelu"),
            norm="layer",
            placement="post",
            dropout=settings.share("dropout", 0.1),
            feed_forward_dropout=settings.share("activation_dropout", 0.0),
            bias=True,
        )

    for setting in ("encoder_layerdrop", "decoder_layerdrop"):
        settings.only(setting, 0, 0.0)
    for setting in ("normalize_before", "add_final_layer_norm", "add_bias_logits"):
        settings.only(setting, False)
    settings.only("tie_word_embeddings", True)
    return (
        Encoder(block("encoder"), settings.layers("encoder_layers", 12)),
        Decoder(block("decoder"), settings.layers("decoder_layers", 12)),
    )


def bart_head(settings: CheckpointSettings, request: Request, targets: nn.Embedding) -> NextTokenHead | None:
    """Logits of the next token; early checkpoints lack the bias, which is 0 there."""
    if request.head != "conditional-generation":
        return None
    return NextTokenHead(targets, tied=True, bias="final_logits_bias" in settings.stored)


def _side(side: str, places: str) -> tuple[Key, ...]:
    ours, layer = f"{side}.blocks.{{n}}", f"{side}.layers.{{n}}"
    parts = ("q_proj", "k_proj", "v_proj")
    return (
        Key(f"{ours}.attention.projection", tuple(f"{layer}.self_attn.{part}" for part in parts)),
        Key(f"{ours}.attention.output", f"{layer}.self_attn.out_proj"),
        Key(f"{ours}.attention_norm", f"{layer}.self_attn_layer_norm"),
        Key(f"{ours}.feed_forward.up", f"{layer}.fc1"),
        Key(f"{ours}.feed_forward.down", f"{layer}.fc2"),
        Key(f"{ours}.feed_forward_norm", f"{layer}.final_layer_norm"),
        Key(f"{places}_places", f"{side}.embed_positions"),
        Key(f"{places}_norm", f"{side}.layernorm_embedding"),
    )


CROSS, READ = "decoder.blocks.{n}.cross", "decoder.layers.{n}.encoder_attn"
BLOCKS = (
    *_side("encoder", "source"),
    *_side("decoder", "target"),
    Key(f"{CROSS}.query", f"{READ}.q_proj"),
    Key(f"{CROSS}.key", f"{READ}.k_proj"),
    Key(f"{CROSS}.value", f"{READ}.v_proj"),
    Key(f"{CROSS}.output", f"{READ}.out_proj"),
    Key(f"{CROSS}_norm", f"{READ}_layer_norm"),
)
SHARED = Key("tokens", "shared", also=("encoder.embed_tokens", "decoder.embed_tokens", "lm_head"))
HEAD_KEYS = {
    "conditional-generation": (Key("head.bias", "final_logits_bias"),),
    "sequence-classification": (
        Key("head.inner.dense", "classification_head.dense"),
        Key("head.inner.out", "classification_head.out_proj"),
    ),
}


def shared_keys(head: str | None, derived: tuple[str, ...] = ()) -> KeyMap:
    """The key map of a model whose encoder, decoder and output head share one embedding."""
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    taken = HEAD_KEYS.get(head or "", ())
    heads = {str(key.published) for keys in HEAD_KEYS.values() for key in keys}
    return KeyMap(
        (SHARED, *BLOCKS),
        taken,
        prefix="model.",
        tied=dict.fromkeys((*copies, *(f"model.{name}" for name in copies), "lm_head.weight"), "shared.weight"),
        unused=("qa_outputs", *sorted(heads - {str(key.published) for key in taken})),
        derived=derived,
    )


def _build(settings: CheckpointSettings, request: Request) -> Model:
    return BartClassifier(settings, request) if request.head == "sequence-classification" else Bart(settings, request)


FAMILY = Family(
    "BART",
    {"bart": "Bart"},
    HEADS,
    _build,
    lambda model: shared_keys(model.request.head),
    ("sequence-classification",),
    labels=3,
    aliases=ALIASES,
)
