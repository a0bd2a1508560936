"""RoBERTa and XLM-RoBERTa: BERT's encoder of text, trained longer, on more, without pairs of sentences.

Liu et al., "RoBERTa: A Robustly Optimized BERT Pretraining Approach" (2019); Conneau et al., "Unsupervised
Cross-lingual Representation Learning at Scale" (2020). The block is BERT's. Positions begin behind
the number of the padding token, p: the n-th token of a text that is no padding token, n = 1, 2, ..., has position
p + n, and a padding token p.

Shape legend: B batch, L length, T tokens as they are computed, E width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..output_heads import Classifier, ItemHead, TokenHead, VocabularyHead
from ..token_layout import TokenLayout
from .bert import BLOCKS, EMBEDDINGS, HEADS, NEW_HEADS, Bert


class Roberta(Bert):
    """RoBERTa with one of its heads, or none."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__(settings, request)
        self.padding = settings.count("pad_token_id", 1, least=0)
        self.longest = self.places.num_embeddings - self.padding - 1
        if self.longest < 1:
            raise settings.error("max_position_embeddings", f"more than pad_token_id + 1 = {self.padding + 1}")
        if request.head == "sequence-classification":
            self.pooler = None  # its classifier has the layer that BERT's pooler is
        width, dropout = self.tokens.embedding_dim, self.dropout.p
        if request.head == "masked-lm":
            tied, eps = settings.flag("tie_word_embeddings", True), settings.eps("layer_norm_eps", 1e-12)
            self.head = TokenHead(VocabularyHead(width, self.tokens, F.gelu, eps, tied=tied))
        elif request.head == "sequence-classification":
            dropout = settings.share("classifier_dropout", dropout)
            self.head = ItemHead(Classifier(width, request.labels, dropout, torch.tanh), settings.get("problem_type"))

    def own_positions(self, input_ids: Tensor, layout: TokenLayout) -> Tensor:
        real = layout.take(input_ids) != self.padding
        return layout.counted(real) * real + self.padding


HEAD_KEYS = {
    "masked-lm": (
        Key("head.inner.dense", "lm_head.dense"),
        Key("head.inner.norm", "lm_head.layer_norm"),
        Key("head.inner.bias", "lm_head.bias"),
        Key("head.inner.out", "lm_head.decoder"),
    ),
    "sequence-classification": (
        Key("head.inner.dense", "classifier.dense"),
        Key("head.inner.out", "classifier.out_proj"),
    ),
    "token-classification": (Key("head.inner.out", "classifier"),),
    "question-answering": (Key("head.inner", "qa_outputs"),),
}


def _keys(model: Roberta) -> KeyMap:
    head = model.request.head or ""
    left = {"lm_head": "masked-lm", "classifier": "classification", "qa_outputs": "question-answering"}
    unused = [name for name, kind in left.items() if not head.endswith(kind)]
    return KeyMap(
        (*EMBEDDINGS, *BLOCKS, Key("pooler", "pooler.dense")),
        HEAD_KEYS.get(head, ()),
        prefix="roberta.",
        tied={
            "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        derived=("embeddings.position_ids",),
        unused=(*unused, *(() if model.pooler else ("pooler",))),
        endings={"gamma": "weight", "beta": "bias"},
    )


FAMILY = Family("RoBERTa", {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}, HEADS, Roberta, _keys, NEW_HEADS)
