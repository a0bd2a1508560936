"""WordPiece tokenizers trained on a user's texts, in the format of BERT (Wu et al. 2016)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

PAD, UNKNOWN, START, END, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ALPHABET = 1000  # characters with a piece of their own; words with rarer ones are unknown
_LEAST = 2  # minimum occurrences of a learned piece
_LONGEST = 100  # maximum length of a word; longer words are unknown
_LONG = re.compile(rf"\S{{{_LONGEST + 1},}}")


def train_word_pieces(texts: Sequence[str], vocabulary: int, *, cased: bool = False) -> tokenizers.Tokenizer:
    """Train a tokenizer with at most `vocabulary` pieces, `[CLS]` before and `[SEP]` after a text.

    Equal texts give equal pieces: the library's trainer alone numbers characters in the order of a hash map, which
    differs between processes, and breaks ties by these numbers.

    Args:
        cased: whether to keep capitals and accents; otherwise they are removed.

    Raises:
        ValueError: a vocabulary too small for the special tokens and the characters of the texts.
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=not cased), pre_tokenizers.BertPreTokenizer()
    characters = _characters(texts, normalizer)
    fixed = [*SPECIAL, *characters, *(f"##{character}" for character in characters)]
    if vocabulary < len(fixed):
        raise ValueError(f"vocabulary: the characters of the texts need at least {len(fixed)} pieces, got {vocabulary}")
    learning = tokenizers.Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    learning.normalizer, learning.pre_tokenizer = normalizer, splitter
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=_LEAST,
        special_tokens=fixed,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    learning.train_from_iterator(map(_without_long_words, texts), trainer)
    # Rebuilt, since the trainer marks all `fixed` tokens as special.
    inner = tokenizers.Tokenizer(models.WordPiece(learning.get_vocab(), unk_token=UNKNOWN))
    inner.normalizer, inner.pre_tokenizer, inner.decoder = normalizer, splitter, decoders.WordPiece(prefix="##")
    inner.add_special_tokens(list(SPECIAL))
    inner.post_processor = processors.BertProcessing((END, SPECIAL.index(END)), (START, SPECIAL.index(START)))
    return inner


def _without_long_words(text: str) -> str:
    """A text without very long words, since the trainer's time grows with the square of the longest word."""
    return _LONG.sub(lambda found: " ".join(_short_words(found[0])), text)


def _short_words(text: str) -> list[str]:
    normal = normalizers.BertNormalizer(lowercase=False).normalize_str(text)  # adds spaces around Chinese characters
    return [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normal) if len(word) <= _LONGEST]


def _characters(texts: Sequence[str], normalizer: normalizers.Normalizer) -> list[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    kept = sorted((-count, character) for character, count in counts.items() if not character.isspace())
    return sorted(character for _, character in kept[:_ALPHABET])
