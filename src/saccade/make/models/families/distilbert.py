"""DistilBERT: half of BERT's layers, trained to answer as all of them do.

Sanh et al., "DistilBERT, a distilled version of BERT: smaller, faster, cheaper and lighter" (2019). The block is
BERT's. No token types and no pooled vector; positions are learned, or fixed sines and cosines that the files hold too.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

import torch.nn.functional as F
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
from .bert import ACTIVATIONS, HEADS, NEW_HEADS

ALIASES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
_EPS = 1e-12  # of all norms; no setting changes it


class DistilBert(TextEncoder):
    """DistilBERT with one of its heads, or none. Positions count from each item's first real token.

    In training, dropout also applies to the output of attention, unlike in the published model.
    """

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        width, dropout = settings.count("dim", 768), settings.share("dropout", 0.1)
        attention = AttentionConfig(
            width,
            settings.count("n_heads", 12),
            bias=True,
            dropout=request.weight_dropout(settings, "attention_dropout", 0.1),
            mechanism=request.mechanism,
        )
        block = BlockConfig(
            attention,
            hidden=settings.count("hidden_dim", 3072),
            activation=settings.choice("activation", ACTIVATIONS, "gelu"),
            norm="layer",
            placement="post",
            dropout=dropout,
            bias=True,
            eps=_EPS,
        )
        self.longest = settings.count("max_position_embeddings", 512)
        self.tokens = nn.Embedding(settings.count("vocab_size", 30522), width)
        self.places = nn.Embedding(self.longest, width)
        self.places.weight.requires_grad_(not settings.flag("sinusoidal_pos_embds", False))
        self.norm, self.dropout = nn.LayerNorm(width, _EPS), nn.Dropout(dropout)
        self.encoder = Encoder(block, settings.layers("n_layers", 6))
        self.head = _head(settings, request, self.tokens, block)

    def embed(
        self, input_ids: Tensor, layout: TokenLayout, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        shape = layout.batch, layout.length
        if token_type_ids is not None:
            check_like("token_type_ids", token_type_ids, shape, 1)
        if position_ids is None:
            places = layout.positions().to(input_ids.device)
        else:
            places = layout.take(check_like("position_ids", position_ids, shape, self.places.num_embeddings))
        return self.dropout(self.norm(self.tokens(layout.take(input_ids)) + self.places(places)))


class _Classifier(nn.Module):
    """`out(dropout(relu(dense(x))))`."""

    def __init__(self, width: int, labels: int, dropout: float):
        super().__init__()
        self.dense, self.out, self.dropout = nn.Linear(width, width), nn.Linear(width, labels), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(F.relu(self.dense(x))))


def _head(settings: CheckpointSettings, request: Request, tokens: nn.Embedding, block: BlockConfig) -> nn.Module | None:
    width, head = block.width, request.head
    if head == "masked-lm":
        tied, activation = settings.flag("tie_word_embeddings", True), FUNCTIONS[block.activation]
        return TokenHead(VocabularyHead(width, tokens, activation, _EPS, tied=tied, published_bias="out"))
    if head == "sequence-classification":
        dropout = settings.share("seq_classif_dropout", 0.2)
        return ItemHead(_Classifier(width, request.labels, dropout), settings.get("problem_type"))
    if head == "token-classification":
        return TokenHead(Classifier(width, request.labels, block.dropout))
    return SpanHead(width, settings.share("qa_dropout", 0.1)) if head == "question-answering" else None


LAYER, BLOCK = "transformer.layer.{n}", "encoder.blocks.{n}"
ATTENTION = f"{LAYER}.attention"
KEYS = (
    Key("tokens", "embeddings.word_embeddings"),
    Key("places", "embeddings.position_embeddings"),
    Key("norm", "embeddings.LayerNorm"),
    Key(f"{BLOCK}.attention.projection", (f"{ATTENTION}.q_lin", f"{ATTENTION}.k_lin", f"{ATTENTION}.v_lin")),
    Key(f"{BLOCK}.attention.output", f"{ATTENTION}.out_lin"),
    Key(f"{BLOCK}.attention_norm", f"{LAYER}.sa_layer_norm"),
    Key(f"{BLOCK}.feed_forward.up", f"{LAYER}.ffn.lin1"),
    Key(f"{BLOCK}.feed_forward.down", f"{LAYER}.ffn.lin2"),
    Key(f"{BLOCK}.feed_forward_norm", f"{LAYER}.output_layer_norm"),
)
HEAD_KEYS = {
    "masked-lm": (
        Key("head.inner.dense", "vocab_transform"),
        Key("head.inner.norm", "vocab_layer_norm"),
        Key("head.inner.bias", "vocab_projector.bias"),
        Key("head.inner.out", "vocab_projector"),
    ),
    "sequence-classification": (Key("head.inner.dense", "pre_classifier"), Key("head.inner.out", "classifier")),
    "token-classification": (Key("head.inner.out", "classifier"),),
    "question-answering": (Key("head.inner", "qa_outputs"),),
}


def _keys(model: DistilBert) -> KeyMap:
    head = model.request.head or ""
    mine = {part.partition(".")[0] for key in HEAD_KEYS.get(head, ()) for part in key.parts}
    known = {part.partition(".")[0] for keys in HEAD_KEYS.values() for key in keys for part in key.parts}
    return KeyMap(
        KEYS,
        HEAD_KEYS.get(head, ()),
        prefix="distilbert.",
        tied={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
        derived=("embeddings.position_ids",),
        unused=tuple(sorted(known - mine)),
    )


FAMILY = Family("DistilBERT", {"distilbert": "DistilBert"}, HEADS, DistilBert, _keys, NEW_HEADS, aliases=ALIASES)
