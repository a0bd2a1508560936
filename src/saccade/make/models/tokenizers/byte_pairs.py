"""Byte-level BPE trained on a user's texts, and its files in the published format."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

START, PAD, END, UNKNOWN = SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # with the ids of BART
BYTES = 256
_LONG = re.compile(r"\S{1000}(?=\S)")


def learn_byte_pairs(
    texts: Sequence[str], vocabulary: int, special: Sequence[str], *, spaced: bool = False
) -> tokenizers.Tokenizer:
    """Train BPE with at most `vocabulary` tokens: special ones, 256 bytes, and merges (Sennrich et al. 2016).

    Equal texts give equal tokens: all bytes are in the initial alphabet, in order, so the result does not depend on the
    order of the library's hash maps.

    Args:
        spaced: whether to treat a text as following a space, so that its first word has the same tokens as elsewhere.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(short_words(texts), trainer)
    return inner


def short_words(texts: Iterable[str]) -> Iterator[str]:
    """Split texts for a trainer whose time grows with the square of the longest word."""
    for text in texts:
        cuts = [0, *(match.end() for match in _LONG.finditer(text)), len(text)]
        yield from (text[start:stop] for start, stop in itertools.pairwise(cuts))


def train_byte_pairs(texts: Sequence[str], vocabulary: int) -> tokenizers.Tokenizer:
    """A tokenizer for an encoder-decoder: adds an end token to each text, and removes the first space when decoding.

    Raises:
        ValueError: a vocabulary too small for the bytes and the special tokens.
    """
    least = BYTES + len(SPECIAL)
    if vocabulary < least:
        raise ValueError(f"vocabulary: {BYTES} bytes and the special tokens need at least {least}, got {vocabulary}")
    inner = learn_byte_pairs(texts, vocabulary, SPECIAL, spaced=True)
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A $B {END}", special_tokens=[(END, SPECIAL.index(END))]
    )
    return inner


def write_byte_pairs(folder: Path, inner: tokenizers.Tokenizer, longest: int) -> None:
    """Write a tokenizer in transformers' format; `longest` is the model's maximum number of tokens."""
    (folder / "tokenizer.json").write_text(inner.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # uses tokenizer.json as it is
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
        "bos_token": START,
        "pad_token": PAD,
        "eos_token": END,
        "unk_token": UNKNOWN,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
