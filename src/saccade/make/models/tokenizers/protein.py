"""The tokenizer of proteins in published ESM folders: one token for each residue."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

CLS, PAD, EOS, UNKNOWN, MASK = "<cls>", "<pad>", "<eos>", "<unk>", "<mask>"


class ProteinTokenizer:
    """One token for each residue letter, between `<cls>` and `<eos>`. Rives et al. (2021); equals EsmTokenizer.

    Special tokens spelled in a sequence, such as `<mask>`, are recognised. White space is ignored. As published, each
    run of letters outside the vocabulary is a single `<unk>`, so a lower-case sequence is one token.

    Args:
        tokens: in the order of their ids.

    Raises:
        ValueError: a special token is missing, or a token is duplicated.

    Example:
        >>> import saccade
        >>> tokens = ["<cls>", "<pad>", "<eos>", "<unk>", "<mask>", *"LAGVSERTIDPKQNFYMHWC"]
        >>> tokenizer = saccade.models.ProteinTokenizer(tokens)
        >>> tokenizer.encode("MKT")
        [0, 21, 16, 12, 2]
        >>> tokenizer(["MKT", "MK"])["attention_mask"]
        tensor([[1, 1, 1, 1, 1],
                [1, 1, 1, 1, 0]])
    """

    def __init__(self, tokens: Sequence[str]):
        self.tokens = list(tokens)
        self._ids = {token: n for n, token in enumerate(self.tokens)}
        missing = [token for token in (CLS, PAD, EOS, UNKNOWN, MASK) if token not in self._ids]
        if missing:
            raise ValueError(f"vocab.txt: expected one token a line, with {', '.join(missing)} among them")
        if len(self._ids) < len(self.tokens):
            raise ValueError("vocab.txt: a token is there twice")
        longest_first = sorted(filter(None, self.tokens), key=len, reverse=True)
        self._known = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    @classmethod
    def from_folder(cls, folder: str | Path) -> ProteinTokenizer:
        """Read the vocab.txt of a model folder. Raises FileNotFoundError if it is missing."""
        path = Path(folder) / "vocab.txt"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: missing from the model folder")
        return cls([line.strip() for line in path.read_text(encoding="utf-8").splitlines()])

    def encode(self, sequence: str) -> list[int]:
        """The ids of one protein, with `<cls>` and `<eos>`."""
        if not isinstance(sequence, str):
            raise TypeError(f"sequence: expected a string of residues, got {type(sequence).__name__}")
        parts = self._known.split(sequence)  # at odd indices, with other text between
        pieces = (part for n, between in enumerate(parts) for part in ([between] if n % 2 else between.split()))
        unknown = self._ids[UNKNOWN]
        return [self._ids[CLS], *(self._ids.get(piece, unknown) for piece in pieces), self._ids[EOS]]

    def __call__(self, sequences: Sequence[str]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask`, int64 (B, L), padded on the right."""
        if isinstance(sequences, str) or not len(sequences):
            raise ValueError(f"sequences: expected a list of at least one protein, got {sequences!r:.60}")
        rows = [self.encode(sequence) for sequence in sequences]
        ids = torch.full((len(rows), max(map(len, rows))), self._ids[PAD])
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(row) for row in rows])
        return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}

    def decode(self, ids: Iterable[int]) -> str:
        """The residues of token ids; `<cls>`, `<eos>` and `<pad>` are left out."""
        tokens = (self.tokens[int(n)] for n in ids)
        return "".join(token for token in tokens if token not in (CLS, EOS, PAD))
