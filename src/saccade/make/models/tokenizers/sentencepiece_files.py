"""SentencePiece models trained on a user's texts, and their files in Marian's format."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ....support._extras import installing
from .byte_pairs import END, PAD, UNKNOWN, short_words
from .sentencepiece import MARIAN_FILES, TARGET_VOCABULARY, open_pieces

MARIAN_SPECIAL = (END, UNKNOWN, PAD)  # same ids in both vocabularies, since config.json has only one value of each


def learn_pieces(texts: Sequence[str], vocabulary: int, language: str) -> bytes:
    """Train a SentencePiece model: at most `vocabulary` pieces by BPE, with every character of the texts.

    Equal texts give equal pieces.

    Args:
        language: of the texts, for the error.

    Raises:
        ValueError: a vocabulary too small for the characters and special tokens, or `sentencepiece` is not installed.
    """
    try:
        from sentencepiece import SentencePieceTrainer
    except ImportError:
        raise ValueError(
            f"separate: needs the package sentencepiece, which is not installed: {installing('translate')}"
        ) from None
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=short_words(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            hard_vocab_limit=False,
            character_coverage=1.0,
            max_sentence_length=1 << 20,  # longer texts are ignored
            eos_id=MARIAN_SPECIAL.index(END),
            unk_id=MARIAN_SPECIAL.index(UNKNOWN),
            pad_id=MARIAN_SPECIAL.index(PAD),
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        least = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
        if least is None:
            raise
        raise ValueError(
            f"vocabulary: the characters of the {language} texts and the special tokens need at least "
            f"{least.group(1)}, got {vocabulary}"
        ) from None
    return model.getvalue()


def write_marian_pieces(
    folder: Path, sources: Sequence[str], targets: Sequence[str], vocabulary: int, longest: int
) -> tuple[int, int]:
    """Write the tokenizer of two languages in transformers' format. Returns the number of pieces of each.

    Args:
        longest: the model's maximum number of tokens.

    Raises:
        ValueError: as of `learn_pieces`.
    """
    counts = []
    names = zip(MARIAN_FILES[:2], (MARIAN_FILES[2], TARGET_VOCABULARY), strict=True)
    for (model_file, vocabulary_file), (language, texts) in zip(
        names, (("source", sources), ("target", targets)), strict=True
    ):
        (folder / model_file).write_bytes(learn_pieces(texts, vocabulary, language))
        model = open_pieces(folder / model_file)
        pieces = {model.id_to_piece(n): n for n in range(model.get_piece_size())}
        (folder / vocabulary_file).write_text(json.dumps(pieces, ensure_ascii=False) + "\n", encoding="utf-8")
        counts.append(len(pieces))
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True, "model_max_length": longest}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return counts[0], counts[1]
