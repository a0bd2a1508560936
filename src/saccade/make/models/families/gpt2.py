"""GPT-2: a decoder of text. Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).

The block with its norm first, x = x + attention(norm(x)), x = x + feed_forward(norm(x)), and one more norm at the end;
biases everywhere, GELU by its tanh formula, learned positions, and a head that is the embedding's transpose.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from ....operator.nn import AttentionConfig, BlockConfig, Decoder
from ....operator.nn._linear import Linear
from ....operator.positions import Learned, Offset
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..output_heads import Classifier, ItemHead
from ..text.decoder import TextDecoder
from .bert import ACTIVATIONS

HEADS = {"causal-lm": "LMHeadModel", "sequence-classification": "ForSequenceClassification"}
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
OTHER_HEADS = ("classifier", "qa_outputs", "multiple_choice_head")  # that decoders are published with


class GPT2(TextDecoder):
    """GPT-2 with the head of a language model, a classifier of its last token, or none."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        settings.only("add_cross_attention", False)
        settings.flag("reorder_and_upcast_attn", False)  # float32 logits, which every backend computes
        width, dropout = settings.count("n_embd", 768), settings.share("resid_pdrop", 0.1)
        attention = AttentionConfig(
            width,
            settings.count("n_head", 12),
            bias=True,
            scale=None if settings.flag("scale_attn_weights", True) else 1.0,
            dropout=request.weight_dropout(settings, "attn_pdrop", 0.1),
            mechanism=request.mechanism,
        )
        block = BlockConfig(
            attention,
            hidden=settings.count("n_inner", 4 * width),
            activation=settings.choice("activation_function", ACTIVATIONS, "gelu_new"),
            norm="layer",
            dropout=dropout,
            bias=True,
            eps=settings.eps("layer_norm_epsilon", 1e-5),
        )
        self.longest = settings.count("n_positions", 1024)
        self.tokens = nn.Embedding(settings.count("vocab_size", 50257), width)
        self.places = Learned(self.longest, width)
        self.dropout = nn.Dropout(settings.share("embd_pdrop", 0.1))
        layers = settings.layers("n_layer", 12)
        by_layer = settings.flag("scale_attn_by_inverse_layer_idx", False)
        self.decoder = Decoder([_divided(block, n + 1) for n in range(layers)]) if by_layer else Decoder(block, layers)
        self.tied = settings.flag("tie_word_embeddings", True)
        self.head = decoder_head(settings, request, self.tokens, tied=self.tied)

    def embed(self, input_ids: Tensor, offset: Offset) -> Tensor:
        return self.dropout(self.places(self.tokens(input_ids), offset))


def _divided(block: BlockConfig, layer: int) -> BlockConfig:
    """The block whose logits are divided by the number of its layer, from 1 (Mistral of Stanford CRFM, 2021)."""
    attention = block.attention
    scale = attention.shape.head**-0.5 if attention.scale is None else attention.scale
    return replace(block, attention=replace(attention, scale=scale / layer))


def decoder_head(
    settings: CheckpointSettings, request: Request, tokens: nn.Embedding, *, tied: bool
) -> nn.Module | None:
    """The output head of a decoder: a classifier of the last token, or a matrix of its own over the vocabulary. None
    for the body alone, and for a head that is `tied` to the embedding."""
    if request.head == "sequence-classification":
        classifier = Classifier(tokens.embedding_dim, request.labels, 0.0, bias=False)
        return ItemHead(classifier, settings.get("problem_type"))
    own = request.head == "causal-lm" and not tied
    return Linear(tokens.embedding_dim, tokens.num_embeddings, bias=False) if own else None


def decoder_keys(
    head: str | None, body: tuple[Key, ...], *, prefix: str, tied: bool, derived: tuple[str, ...]
) -> KeyMap:
    """The map of a decoder with one of these heads; the first key of its body is the embedding's."""
    heads = {"causal-lm": (Key("head", "lm_head"),), "sequence-classification": (Key("head.inner.out", "score"),)}
    mine = heads.get(head or "", ())
    return KeyMap(
        body,
        mine,
        prefix=prefix,
        tied={"lm_head.weight": f"{body[0].published}.weight"} if tied else {},
        derived=derived,
        unused=(*OTHER_HEADS, *({"lm_head", "score"} - {key.published for key in mine})),
    )


def gpt_keys(projection: str | tuple[str, ...], output: str, *, transposed: bool = False) -> tuple[Key, ...]:
    """The body of GPT-2 and GPT-Neo, which name the matrices of attention differently."""
    block = "decoder.blocks.{n}"
    return (
        Key("tokens", "wte"),
        Key("places", "wpe"),
        Key(f"{block}.attention_norm", "h.{n}.ln_1"),
        Key(f"{block}.attention.projection", projection, transposed=transposed),
        Key(f"{block}.attention.output", output, transposed=transposed),
        Key(f"{block}.feed_forward_norm", "h.{n}.ln_2"),
        Key(f"{block}.feed_forward.up", "h.{n}.mlp.c_fc", transposed=transposed),
        Key(f"{block}.feed_forward.down", "h.{n}.mlp.c_proj", transposed=transposed),
        Key("decoder.norm", "ln_f"),
    )


def _keys(model: GPT2) -> KeyMap:
    body = gpt_keys("h.{n}.attn.c_attn", "h.{n}.attn.c_proj", transposed=True)
    derived = ("h.{n}.attn.bias", "h.{n}.attn.masked_bias")
    return decoder_keys(model.request.head, body, prefix="transformer.", tied=model.tied, derived=derived)


FAMILY = Family("GPT-2", {"gpt2": "GPT2"}, HEADS, GPT2, _keys, ("sequence-classification",), aliases=ALIASES)
