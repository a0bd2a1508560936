"""ELECTRA: BERT's encoder, trained to find the tokens that a small generator replaced.

Clark et al., "ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators" (2020). The block is
BERT's. Embeddings may be narrower than the blocks: x = P e, P a projection. The discriminator's logit of each token is
w . gelu(D x) + b, positive where it takes the token for a replaced one.

Shape legend: B batch, L length, T tokens as they are computed, E width, D width of the embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....operator._products import FUNCTIONS
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..output_heads import Classifier, ItemHead, TokenHead, VocabularyHead
from ..token_layout import TokenLayout
from .bert import BLOCKS, EMBEDDINGS, HEADS as BERT_HEADS, NEW_HEADS, Bert
from .roberta import HEAD_KEYS as ROBERTA_KEYS

HEADS = {**BERT_HEADS, "replaced-tokens": "ForPreTraining"}
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}  # where config.json says nothing


class Electra(Bert):
    """ELECTRA's discriminator or generator with one of its heads, or none. It has no pooled vector."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        settings.values = {**SIZES, **settings.values}
        super().__init__(settings, request)
        self.pooler = None
        width, inner = self.encoder.config.width, settings.count("embedding_size", 128)
        eps = settings.eps("layer_norm_eps", 1e-12)
        self.tokens, self.places, self.types = (
            nn.Embedding(table.num_embeddings, inner) for table in (self.tokens, self.places, self.types)
        )
        self.norm = nn.LayerNorm(inner, eps)
        self.project = nn.Linear(inner, width) if inner != width else None
        if request.head == "masked-lm":
            tied = settings.flag("tie_word_embeddings", True)
            self.head = TokenHead(VocabularyHead(width, self.tokens, F.gelu, eps, tied=tied, published_bias="out"))
        elif request.head == "sequence-classification":
            dropout = settings.share("classifier_dropout", self.dropout.p)
            self.head = ItemHead(Classifier(width, request.labels, dropout, F.gelu), settings.get("problem_type"))
        elif request.head == "replaced-tokens":
            self.head = ReplacedHead(width, self.encoder.config.activation)

    def embed(
        self, input_ids: Tensor, layout: TokenLayout, token_type_ids: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        x = super().embed(input_ids, layout, token_type_ids, position_ids)
        return x if self.project is None else self.project(x)


class ReplacedHead(nn.Module):
    """One logit for every token: whether the token was replaced. `labels` (B, L), 1 for replaced tokens."""

    def __init__(self, width: int, activation: str):
        super().__init__()
        self.dense, self.out, self.activation = nn.Linear(width, width), nn.Linear(width, 1), FUNCTIONS[activation]

    def forward(self, x: Tensor, layout: TokenLayout, labels: Tensor | None = None) -> dict[str, Any]:
        """`logits` (B, L), and `loss`, the mean over real tokens."""
        logits = self.out(self.activation(self.dense(x))).squeeze(-1)
        loss = None
        if labels is not None:
            each = F.binary_cross_entropy_with_logits(logits, layout.take(labels).to(logits), reduction="none")
            real = torch.ones_like(each) if layout.real is None else layout.take(layout.real).to(each)
            loss = (each * real).sum() / real.sum()
        return {"logits": layout.put(logits), "loss": loss}


HEAD_KEYS = {
    **ROBERTA_KEYS,
    "masked-lm": (
        Key("head.inner.dense", "generator_predictions.dense"),
        Key("head.inner.norm", "generator_predictions.LayerNorm"),
        Key("head.inner.bias", "generator_lm_head.bias"),
        Key("head.inner.out", "generator_lm_head"),
    ),
    "replaced-tokens": (
        Key("head.dense", "discriminator_predictions.dense"),
        Key("head.out", "discriminator_predictions.dense_prediction"),
    ),
}


def _keys(model: Electra) -> KeyMap:
    head = model.request.head or ""
    left = {
        "generator_predictions": "masked-lm",
        "generator_lm_head": "masked-lm",
        "discriminator_predictions": "replaced-tokens",
        "classifier": "classification",
        "qa_outputs": "question-answering",
    }
    return KeyMap(
        (*EMBEDDINGS, Key("project", "embeddings_project"), *BLOCKS),
        HEAD_KEYS.get(head, ()),
        prefix="electra.",
        tied={"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
        derived=("embeddings.position_ids",),
        unused=("sequence_summary", *(name for name, kind in left.items() if not head.endswith(kind))),
        endings={"gamma": "weight", "beta": "bias"},
    )


FAMILY = Family("ELECTRA", {"electra": "Electra"}, HEADS, Electra, _keys, NEW_HEADS)
