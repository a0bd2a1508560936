"""Marian: translation. Junczys-Dowmunt et al., "Marian: Fast Neural Machine Translation in C++" (2018); most of its
published weights are OPUS-MT's (Tiedemann and Thottingal 2020).

The Transformer of Vaswani et al. (2017) as it was published: norm(x + f(x)), sinusoidal positions that are added to
embeddings times sqrt(E), one embedding for source, target and head. Sines stand in the first half of a position's
vector and cosines in the second. What Marian adds is a stored bias of the logits, swish where it is asked for, and
vocabularies of source and target apart in newer models.

Shape legend: T tokens as they are computed, E width.
"""

from __future__ import annotations

from torch import Tensor, nn

from ....operator.positions import Offset, Sinusoidal
from ..checkpoints.keys import Key, KeyMap
from ..checkpoints.settings import CheckpointSettings
from ..model import Family, Request
from ..text.encoder_decoder import EncoderDecoder
from .bart import ALIASES, BLOCKS, HEAD_KEYS, bart_head, bart_stacks, shared_keys

HEADS = {"conditional-generation": "MTModel"}
PLACES = ("encoder.embed_positions", "decoder.embed_positions")  # the files may hold them; they are a formula


class Marian(EncoderDecoder):
    """A Marian model with its head, or its body alone."""

    def __init__(self, settings: CheckpointSettings, request: Request):
        super().__init__()
        settings.only("normalize_embedding", False)
        settings.only("static_position_embeddings", True)
        self.encoder, self.decoder = bart_stacks(settings, request)
        width, vocabulary = self.encoder.config.width, settings.count("vocab_size", 58101)
        targets = settings.count("decoder_vocab_size", vocabulary)
        pad = settings.token("pad_token_id", 58100, min(vocabulary, targets))
        self.longest = settings.count("max_position_embeddings", 1024)
        self.start = settings.count("decoder_start_token_id", 58100, least=0)
        self.scale = width**0.5 if settings.flag("scale_embedding", False) else 1.0
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=pad)
        self.target_tokens = None
        if not settings.flag("share_encoder_decoder_embeddings", True):
            self.target_tokens = nn.Embedding(targets, width, padding_idx=pad)
        elif targets != vocabulary:
            raise settings.error("decoder_vocab_size", f"{vocabulary}, as vocab_size, where one embedding serves both")
        self.places = Sinusoidal(width, layout="halves")
        self.dropout = nn.Dropout(self.encoder.config.dropout)
        self.head = bart_head(settings, request, self.tokens if self.target_tokens is None else self.target_tokens)

    def embed_source(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.places(self.tokens(input_ids) * self.scale, positions))

    def embed_target(self, input_ids: Tensor, offset: Offset) -> Tensor:
        tokens = self.tokens if self.target_tokens is None else self.target_tokens
        return self.dropout(self.places(tokens(input_ids) * self.scale, offset))


def _keys(model: Marian) -> KeyMap:
    if model.target_tokens is None:
        return shared_keys(model.request.head, derived=PLACES)
    return KeyMap(
        (Key("tokens", "encoder.embed_tokens"), Key("target_tokens", "decoder.embed_tokens"), *BLOCKS),
        HEAD_KEYS["conditional-generation"] if model.head is not None else (),
        prefix="model.",
        tied={"lm_head.weight": "decoder.embed_tokens.weight"},
        derived=PLACES,
        unused=() if model.head is not None else ("lm_head", "final_logits_bias"),
    )


FAMILY = Family("Marian", {"marian": "Marian"}, HEADS, Marian, _keys, aliases=ALIASES)
