"""Decodes the output of a CTC head: by the most probable token of each frame, or by beam search.

A text is a sequence of tokens without the blank. An alignment gives a token or the blank for every frame; its text is
obtained by merging repeats and dropping blanks. The probability of a text is the sum over its alignments.

Shape legend: B batch, L frames, V vocabulary, N beams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.reading import read_json

Array = np.ndarray[Any, np.dtype[np.float64]]


class Hypothesis(NamedTuple):
    """A text and its log-probability, summed over the alignments that the search kept."""

    tokens: tuple[int, ...]
    log_probability: float


def collapse(alignment: Iterable[int], blank: int = 0) -> tuple[int, ...]:
    """The text of an alignment: repeats merged, then blanks dropped."""
    return tuple(token for token, _ in groupby(alignment) if token != blank)


def greedy(logits: Tensor, lengths: Sequence[int] | Tensor | None = None, *, blank: int = 0) -> list[tuple[int, ...]]:
    """The text of each item's most probable alignment, which may differ from the most probable text.

    Args:
        logits: (B, L, V), or log-probabilities.
        lengths: (B,), number of frames of each item; None: all.
        blank: id of the blank.

    Raises:
        TypeError, ValueError: as in `beam_search`.
    """
    counts = _check(logits, lengths, blank)
    return [collapse(row[:n], blank) for row, n in zip(logits.argmax(-1).tolist(), counts, strict=True)]


def beam_search(
    logits: Tensor, lengths: Sequence[int] | Tensor | None = None, *, blank: int = 0, beams: int = 16, best: int = 1
) -> list[list[Hypothesis]]:
    """The most probable texts of each item, best first, found by beam search without a language model.

    Prefix search of Graves et al., "Connectionist Temporal Classification" (2006), section 3.2, with the pruning of
    Hannun et al., "First-Pass Large Vocabulary Continuous Speech Recognition" (2014): after each frame the `beams`
    most probable prefixes are kept. Probabilities are exact if no prefix is dropped.

    Args:
        logits: (B, L, V), or log-probabilities; computed in float64.
        lengths: (B,), number of frames of each item; None: all.
        blank: id of the blank.
        beams: N, number of prefixes kept. Time grows with L N V.
        best: maximum number of texts returned for each item.

    Raises:
        TypeError: not a tensor of floats. ValueError: another shape, NaN, lengths beyond the frames, a blank outside
            the vocabulary, `best` larger than `beams`.
    """
    counts = _check(logits, lengths, blank)
    for name, value in (("beams", beams), ("best", best)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected a positive int, got {value!r}")
    if best > beams:
        raise ValueError(f"best: expected at most the {beams} beams, got {best}")
    frames = logits.detach().double().log_softmax(-1).cpu().numpy()
    return [_searched(rows[:n], blank, beams)[:best] for rows, n in zip(frames, counts, strict=True)]


def _searched(frames: Array, blank: int, beams: int) -> list[Hypothesis]:
    """All kept texts of an item, from log-probabilities (L, V)."""
    prefixes: list[tuple[int, ...]] = [()]
    # For each prefix: log-probability of its alignments that end with the blank, and of the others.
    blanks, tokens = np.zeros(1), np.full(1, -np.inf)
    for row in frames:
        last = np.array([prefix[-1] if prefix else blank for prefix in prefixes])
        rows, total = np.arange(len(prefixes)), np.logaddexp(blanks, tokens)
        longer = total[:, None] + row
        longer[rows, last] = blanks + row[last]  # repeated tokens need a blank between them
        longer[:, blank] = -np.inf
        stay_blanks, stay_tokens = total + row[blank], np.where(last == blank, -np.inf, tokens + row[last])
        where = {prefix: n for n, prefix in enumerate(prefixes)}
        for n, prefix in enumerate(prefixes):
            shorter = where.get(prefix[:-1]) if prefix else None
            if shorter is not None:  # the prefix is also reached from a shorter one
                stay_tokens[n] = np.logaddexp(stay_tokens[n], longer[shorter, prefix[-1]])
                longer[shorter, prefix[-1]] = -np.inf
        scores = np.concatenate((np.logaddexp(stay_blanks, stay_tokens), longer.ravel()))
        kept = [n for n in np.argsort(-scores, kind="stable")[:beams].tolist() if scores[n] > -np.inf]
        old = len(prefixes)
        sources = [(n, None) if n < old else divmod(n - old, row.size) for n in kept]
        prefixes = [prefixes[n] if token is None else (*prefixes[n], token) for n, token in sources]
        blanks = np.array([stay_blanks[n] if token is None else -np.inf for n, token in sources])
        tokens = np.array([stay_tokens[n] if token is None else longer[n, token] for n, token in sources])
    scored = zip(prefixes, np.logaddexp(blanks, tokens).tolist(), strict=True)
    return sorted((Hypothesis(*each) for each in scored), key=lambda each: -each.log_probability)


def _check(logits: object, lengths: Sequence[int] | Tensor | None, blank: int) -> list[int]:
    """The number of frames of each item, after checking the arguments."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits: expected a tensor of floats (batch, frames, vocabulary), got {type(logits).__name__}")
    if logits.ndim != 3 or 0 in logits.shape:
        raise ValueError(f"logits: expected shape (batch, frames, vocabulary), got {tuple(logits.shape)}")
    if bool(torch.isnan(logits).any()):
        raise ValueError("logits: hold NaN")
    batch, frames, vocabulary = logits.shape
    if not 0 <= blank < vocabulary:
        raise ValueError(f"blank: expected a token from 0 to {vocabulary - 1}, got {blank}")
    if lengths is None:
        return [frames] * batch
    counts = [int(n) for n in lengths]
    if len(counts) != batch or not all(0 <= n <= frames for n in counts):
        raise ValueError(f"lengths: expected {batch} numbers from 0 to {frames}, got {counts}")
    return counts


@dataclass(frozen=True)
class CtcVocabulary:
    """The vocabulary of a CTC head: vocab.json and tokenizer_config.json, in the format of wav2vec 2.0.

    Attributes:
        tokens: by id.
        blank: text of the blank.
        delimiter: the token between words; it is decoded as `space`.
        unknown: text for ids without a token.
        lower: whether to lowercase the decoded text.
    """

    tokens: dict[int, str]
    blank: str = "<pad>"
    delimiter: str = "|"
    space: str = " "
    unknown: str = "<unk>"
    lower: bool = False

    @classmethod
    def of_folder(cls, folder: Path | None) -> CtcVocabulary:
        """Read the vocabulary in a model's folder.

        Raises:
            FileNotFoundError: no vocab.json. ValueError: the file is damaged, or for several languages.
        """
        if folder is None:
            raise FileNotFoundError("vocab.json: the model was made in memory and has no vocabulary for its tokens")
        path = folder / "vocab.json"
        written = read_json(path)
        added = read_json(folder / "added_tokens.json") if (folder / "added_tokens.json").is_file() else {}
        for names in (written, added):
            if not isinstance(names, dict) or not all(type(n) is int and n >= 0 for n in names.values()):
                raise ValueError(f"{path}: expected one object of tokens and their numbers")
        settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}

        def named(key: str, default: str) -> str:
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            return default if value is None else str(value)

        further = settings.get("added_tokens_decoder", {})
        tokens = {int(n): str(token["content"]) for n, token in further.items()} | {n: t for t, n in added.items()}
        return cls(
            tokens | {n: token for token, n in written.items()},
            named("pad_token", "<pad>"),
            named("word_delimiter_token", "|"),
            named("replace_word_delimiter_char", " "),
            named("unk_token", "<unk>"),
            bool(settings.get("do_lower_case", False)),
        )

    def text(self, tokens: Iterable[int]) -> str:
        """The text of collapsed tokens."""
        written = (self.tokens.get(token, self.unknown) for token in tokens)
        text = "".join(self.space if t == self.delimiter else t for t in written if t != self.blank).strip()
        return text.lower() if self.lower else text
