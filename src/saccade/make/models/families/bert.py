"""BERT: an encoder of text. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019).

The block with its norm last, x = norm(x + attention(x)), x = norm(x + feed_forward(x)); biases everywhere, exact GELU,
learned positions, and an embedding of the sentence a token belongs to. MiniLM (Wang et al. 2020) is a small one.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ....operator._products import FUNCTIONS
from ....operator.nn import AttentionConfig, BlockConfig, Encoder
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..inputs import check_like
from ..model import Family, Request
from ..output_heads import Classifier, ItemHead, SpanHead, TokenHead, VocabularyHead
from ..text.encoder import TextEncoder
from ..token_layout import TokenLayout

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
HEADS = {
    "masked-lm": "ForMaskedLM",
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
}
NEW_HEADS = ("sequence-classification", "token-classification", "question-answering")


class Bert(TextEncoder):
    """BERT with one of its heads, or none. Positions count from each item's first real token."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        for setting in ("is_decoder", "add_cross_attention"):
            settings.only(setting, False)
        settings.only("position_embedding_type", "absolute")
        block = bert_block(settings, request)
        width, dropout = block.width, block.dropout
        self.longest = settings.count("max_position_embeddings", 512)
        self.tokens = nn.Embedding(settings.count("vocab_size", 30522), width)
        self.places = nn.Embedding(self.longest, width)
        self.types = nn.Embedding(settings.count("type_vocab_size", 2), width)
        self.norm = nn.LayerNorm(width, settings.eps("layer_norm_eps", 1e-12))
        self.dropout = nn.Dropout(dropout)
        self.encoder = Encoder(block, settings.layers("num_hidden_layers", 12))
        stored = any(name.endswith("pooler.dense.weight") for name in settings.stored)
        pooled = request.head == "sequence-classification" or (request.head is None and stored)
        self.pooler = nn.Linear(width, width) if pooled else None
        self.head = bert_head(settings, request, self.tokens, block)

    def embed(
        self, input_ids: Tensor, layout: TokenLayout, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        shape = layout.batch, layout.length
        if position_ids is None:
            places = self.own_positions(input_ids, layout)
        else:
            places = layout.take(check_like("position_ids", position_ids, shape, self.places.num_embeddings))
        if token_type_ids is None:
            types = self.types.weight[0]
        else:
            types = self.types(
                layout.take(check_like("token_type_ids", token_type_ids, shape, self.types.num_embeddings))
            )
        return self.dropout(self.norm(self.tokens(layout.take(input_ids)) + types + self.places(places)))

    def own_positions(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        """The positions of the computed tokens."""
        return layout.positions().to(input_ids.device)

    def pool(self, x: Tensor, layout: TokenLayout) -> Tensor | None:
        return None if self.pooler is None else torch.tanh(self.pooler(layout.first(x)))


def bert_block(
    settings: CheckpointSettings,
    request: Request,
    *,
    placement: str = "post",
    dropouts: tuple[str, str] = ("attention_probs_dropout_prob", "hidden_dropout_prob"),
    dropout: float = 0.1,
    eps: float = 1e-12,
) -> BlockConfig:
    """The block of BERT and of later models like it, by their common settings.

    Args:
        dropouts: the settings of dropout on attention's weights, and on what is added to the residual stream.
        dropout, eps: where config.json says nothing.
    """
    attention = AttentionConfig(
        settings.count("hidden_size", 768),
        settings.count("num_attention_heads", 12),
        bias=True,
        dropout=request.weight_dropout(settings, dropouts[0], dropout),
        mechanism=request.mechanism,
    )
    return BlockConfig(
        attention,
        hidden=settings.count("intermediate_size", 3072),
        activation=settings.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        placement=placement,
        dropout=settings.share(dropouts[1], dropout),
        bias=True,
        eps=settings.eps("layer_norm_eps", eps),
    )


def bert_head(
    settings: CheckpointSettings, request: Request, tokens: nn.Embedding, block: BlockConfig
) -> nn.Module | None:
    """The head of the requested class; None for the body alone."""
    width, head = block.width, request.head
    dropout = settings.share("classifier_dropout", block.dropout)
    if head == "masked-lm":
        tied = settings.flag("tie_word_embeddings", True)
        activation = FUNCTIONS[block.activation]
        return TokenHead(VocabularyHead(width, tokens, activation, settings.eps("layer_norm_eps", 1e-12), tied=tied))
    if head == "sequence-classification":
        return ItemHead(Classifier(width, request.labels, dropout), settings.get("problem_type"))
    if head == "token-classification":
        return TokenHead(Classifier(width, request.labels, dropout))
    return SpanHead(width) if head == "question-answering" else None


LAYER, ATTENTION = "encoder.layer.{n}", "encoder.layer.{n}.attention.self"
BLOCKS = (
    Key("encoder.blocks.{n}.attention.projection", (f"{ATTENTION}.query", f"{ATTENTION}.key", f"{ATTENTION}.value")),
    Key("encoder.blocks.{n}.attention.output", f"{LAYER}.attention.output.dense"),
    Key("encoder.blocks.{n}.attention_norm", f"{LAYER}.attention.output.LayerNorm"),
    Key("encoder.blocks.{n}.feed_forward.up", f"{LAYER}.intermediate.dense"),
    Key("encoder.blocks.{n}.feed_forward.down", f"{LAYER}.output.dense"),
    Key("encoder.blocks.{n}.feed_forward_norm", f"{LAYER}.output.LayerNorm"),
)
EMBEDDINGS = (
    Key("tokens", "embeddings.word_embeddings"),
    Key("places", "embeddings.position_embeddings"),
    Key("types", "embeddings.token_type_embeddings"),
    Key("norm", "embeddings.LayerNorm"),
)
HEAD_KEYS = {
    "masked-lm": (
        Key("head.inner.dense", "cls.predictions.transform.dense"),
        Key("head.inner.norm", "cls.predictions.transform.LayerNorm"),
        Key("head.inner.bias", "cls.predictions.bias"),
        Key("head.inner.out", "cls.predictions.decoder"),
    ),
    "sequence-classification": (Key("head.inner.out", "classifier"),),
    "token-classification": (Key("head.inner.out", "classifier"),),
    "question-answering": (Key("head.inner", "qa_outputs"),),
}


def _keys(model: Bert) -> KeyMap:
    head = model.request.head
    mine = {key.published for key in HEAD_KEYS.get(head or "", ())}
    return KeyMap(
        (*EMBEDDINGS, *BLOCKS, Key("pooler", "pooler.dense")),
        HEAD_KEYS.get(head or "", ()),
        prefix="bert.",
        tied={
            "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },  # untied, they are taken by `out`
        derived=("embeddings.position_ids",),
        # Pre-training left them behind; a body may be opened without the head it was published with.
        unused=tuple({"cls", "classifier", "qa_outputs", *(() if model.pooler else ("pooler",))} - mine),
        endings={"gamma": "weight", "beta": "bias"},
        anew=("pooler",),  # models trained without a classifier may have none
    )


FAMILY = Family("BERT", {"bert": "Bert"}, HEADS, Bert, _keys, NEW_HEADS)
