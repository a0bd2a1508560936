"""SentencePiece models learned from a user's own texts, as the files that published Marian folders have."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

from ....support._extras import installing
from .byte_pairs import END, PAD, UNKNOWN, short_words
from .sentencepiece import MARIAN_FILES, TARGET_VOCABULARY, open_pieces

MARIAN_SPECIAL = (END, UNKNOWN, PAD)  # their numbers are the same in both vocabularies, as config.json has them once


def learn_pieces(texts: Sequence[str], vocabulary: int, language: str) -> bytes:
    """A SentencePiece model: at most `vocabulary` pieces by BPE, every character of the texts among them.

    The same texts give the same pieces.

    Args:
        language: whose texts they are, for the error.

    Raises:
        ValueError: no room for the characters and the special tokens, or `sentencepiece` is not installed.
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
            max_sentence_length=1 << 20,  # longer ones would be left out
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
    """The tokenizer of both languages as the files that transformers reads. Returns how many pieces each has.

    Args:
        longest: tokens that the model reads at once.

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
