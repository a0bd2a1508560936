"""Translators with new weights: BART's layout with one vocabulary for both languages, Marian's with one for each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ....operator.positions import Sinusoidal
from ...models import Model
from ...models.checkpoints.settings import GENERATION
from ...models.families.bart import SKIPPED, Bart
from ...models.loading import new_model
from ...models.tokenizers.byte_pairs import END, PAD, SPECIAL, START, train_byte_pairs, write_byte_pairs
from ...models.tokenizers.sentencepiece import open_sentencepiece
from ...models.tokenizers.sentencepiece_files import MARIAN_SPECIAL, write_marian_pieces
from .._temporary import kept_while_used, temporary_folder
from ._text_task import LONGEST

BART_TOKENS = {  # numbers of the special tokens, as config.json has them
    "bos_token_id": SPECIAL.index(START),
    "pad_token_id": SPECIAL.index(PAD),
    "eos_token_id": SPECIAL.index(END),
    "decoder_start_token_id": SPECIAL.index(START),
}
MARIAN_TOKENS = {
    "pad_token_id": MARIAN_SPECIAL.index(PAD),
    "eos_token_id": MARIAN_SPECIAL.index(END),
    "decoder_start_token_id": MARIAN_SPECIAL.index(PAD),  # as Marian's always begin
}


@dataclasses.dataclass(frozen=True)
class TranslatorSizes:
    """Sizes of an encoder-decoder.

    Args:
        layers, heads, width, dropout: of encoder and decoder alike.
        vocabulary: tokens of each vocabulary, at most.
        longest: tokens of a text; None: `LONGEST`.
    """

    layers: int
    heads: int
    width: int
    dropout: float
    vocabulary: int
    longest: int | None

    @property
    def positions(self) -> int:
        return self.longest or LONGEST

    def settings(self) -> dict[str, Any]:
        """The sizes as entries of config.json, for both families."""
        sides = ("encoder", "decoder")
        return {
            "d_model": self.width,
            **{f"{side}_layers": self.layers for side in sides},
            **{f"{side}_attention_heads": self.heads for side in sides},
            **{f"{side}_ffn_dim": 2 * self.width for side in sides},
            "max_position_embeddings": self.positions,
            "dropout": self.dropout,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "initializer_range": self.width**-0.5,
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
            "forced_eos_token_id": None,
        }


def new_bart(sources: Sequence[str], targets: Sequence[str], sizes: TranslatorSizes, beams: int) -> Model:
    """One byte-level BPE of both languages, which is the published tokenizer of this family.

    Raises:
        ValueError: a vocabulary without room for the bytes.
    """
    folder = temporary_folder()
    pieces = train_byte_pairs([*sources, *targets], sizes.vocabulary)
    write_byte_pairs(folder, pieces, sizes.positions)
    _write_generation(folder, BART_TOKENS, beams, max(len(pieces.encode(text).ids) for text in targets), sizes)
    model = new_model(
        folder,
        head="conditional-generation",
        model_type="bart",
        vocab_size=pieces.get_vocab_size(),
        **sizes.settings(),
        **BART_TOKENS,
    )
    assert isinstance(model, Bart)
    _begin_as_sines(model, sizes)
    return kept_while_used(model, folder)


def _begin_as_sines(model: Bart, sizes: TranslatorSizes) -> None:
    """Positions that are learned begin as waves, as large as tokens: a place of the target then resembles the same
    place of the source, and a decoder learns sooner where to read."""
    waves = Sinusoidal(sizes.width)(torch.zeros(1, sizes.positions, sizes.width))[0]
    for places in (model.source_places, model.target_places):
        places.weight.data[SKIPPED:] = waves * sizes.width**-0.5


def new_marian(sources: Sequence[str], targets: Sequence[str], sizes: TranslatorSizes, beams: int) -> Model:
    """A SentencePiece model of each language, which are the published tokenizers of this family.

    Raises:
        ValueError: a vocabulary without room for a language's characters, or `sentencepiece` is not installed.
    """
    folder = temporary_folder()
    counts = write_marian_pieces(folder, sources, targets, sizes.vocabulary, sizes.positions)
    written = open_sentencepiece(folder).targets
    _write_generation(folder, MARIAN_TOKENS, beams, max(len(written.whole(text)) for text in targets), sizes)
    return kept_while_used(
        new_model(
            folder,
            head="conditional-generation",
            model_type="marian",
            vocab_size=counts[0],
            decoder_vocab_size=counts[1],
            share_encoder_decoder_embeddings=False,
            scale_embedding=True,
            static_position_embeddings=True,
            **sizes.settings(),
            **MARIAN_TOKENS,
        ),
        folder,
    )


def _write_generation(folder: Path, tokens: dict[str, int], beams: int, most: int, sizes: TranslatorSizes) -> None:
    """Limit the output to twice the input (`most` tokens): a new model does not know yet when to end."""
    settings = {**tokens, "num_beams": beams, "max_length": min(2 * most, sizes.positions)}
    (folder / GENERATION).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
