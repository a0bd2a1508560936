"""Texts as the tokens of a CTC head, and the loss of Graves et al., "Connectionist Temporal Classification" (2006).

Shape legend: B sounds of a batch, L frames, V tokens, U characters of the longest text.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.decoding.ctc import CtcVocabulary, beam_search, greedy
from ...models.output_heads import IGNORED

BLANK, UNKNOWN, SPACE = "<pad>", "<unk>", "|"
BEGINNING = (BLANK, UNKNOWN, SPACE)  # of every vocabulary: the blank is token 0


def text_of(value: Any, place: str) -> str:
    """The text in a cell, with composed characters and single spaces. ValueError if there is none."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text, got {value!r:.40}")
    text = " ".join(unicodedata.normalize("NFC", value).split())
    if not text:
        raise ValueError(f"{place}: the text is empty")
    if SPACE in text:
        raise ValueError(f"{place}: the text has {SPACE!r}, which stands for a space in the vocabulary; replace it")
    return text


def characters_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The characters of texts but for the space, in order."""
    return tuple(sorted(set().union(*texts) - {" "}))


class Characters:
    """The tokens of a model, and texts as their numbers.

    Args:
        characters: of the training texts; all others become the unknown token.
    """

    def __init__(self, characters: Sequence[str]):
        self.tokens = (*BEGINNING, *characters)
        self._numbers = {" " if token == SPACE else token: n for n, token in enumerate(self.tokens)}
        self._written = CtcVocabulary(dict(enumerate(self.tokens)), BLANK, SPACE, " ", UNKNOWN)

    def numbers(self, text: str) -> tuple[int, ...]:
        return tuple(self._numbers.get(character, BEGINNING.index(UNKNOWN)) for character in text)

    def texts(self, logits: Tensor, frames: Tensor, beams: int) -> list[str]:
        """Decode logits (B, L, V) with frames (B,): greedily, or by a beam search."""
        lengths = frames.tolist()
        if beams == 1:
            return [self._written.text(tokens) for tokens in greedy(logits, lengths)]
        return [self._written.text(best[0].tokens) for best in beam_search(logits, lengths, beams=beams)]

    def per_frame(self, logits: Tensor) -> list[str]:
        """The most probable token of each frame (L, V) of one sound, "" for the blank."""
        numbers = logits.argmax(-1).tolist()
        return ["" if n == 0 else " " if self.tokens[n] == SPACE else self.tokens[n] for n in numbers]

    def write(self, folder: Path) -> None:
        """Write vocab.json and tokenizer_config.json as in published models."""
        settings = {
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
            "pad_token": BLANK,
            "unk_token": UNKNOWN,
            "word_delimiter_token": SPACE,
            "bos_token": None,
            "eos_token": None,
            "do_lower_case": False,
            "clean_up_tokenization_spaces": False,
        }
        vocabulary = {token: n for n, token in enumerate(self.tokens)}
        for name, values in (("vocab.json", vocabulary), ("tokenizer_config.json", settings)):
            (folder / name).write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def are_those_of(self, folder: Path) -> bool:
        """Whether the vocab.json of a folder has the same tokens with the same ids."""
        try:
            return CtcVocabulary.of_folder(folder).tokens == dict(enumerate(self.tokens))
        except FileNotFoundError:
            return False


def needed_frames(numbers: Sequence[int]) -> int:
    """The fewest frames for a text: one for each token, and a blank between equal ones."""
    return len(numbers) + sum(one == other for one, other in pairwise(numbers))


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """Labels (B, U): each text followed by `IGNORED`."""
    rows = [torch.tensor(numbers) for numbers in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)


def ctc_loss(logits: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    """The mean over all characters of a batch of -log P(text) / characters, so that each character counts alike.

    Args:
        logits: (B, L, V).
        frames: (B,), the number of each sound's frames.
        labels: (B, U), `IGNORED` behind each text.
    """
    meant = labels != IGNORED
    logs = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, labels[meant], frames, meant.sum(1), blank=0, reduction="sum") / meant.sum()
