"""A model whose every weight is prescribed: tokens are words and marks, heads are functions that say the weights.

The logits are log w with scale 1: queries hold them, keys are unit vectors, so the weights are w exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from saccade import Causal
from saccade.inspection import TextModel
from saccade.inspection._models import Tokens
from saccade.operator._call import ObservedCall

CLS, SEP = 1, 2
Head = Callable[[Sequence[int]], Tensor]  # token ids -> weights (L, L), rows sum to at most 1


class PretendModel(TextModel):
    """`layers`: the heads of each. `pieces=2` cuts longer words into tokens of two letters."""

    name = "pretend"

    def __init__(self, layers, *, causal=False, special=True, context=None, pieces=None, mask=None, values=None):
        self._layers = layers
        self.heads = tuple(len(heads) for heads in layers)
        self.causal, self.context = causal, context
        self.before = (CLS,) if special else ()
        self.after = (SEP,) if special and not causal else ()
        self.special = frozenset({CLS, SEP}) if special else frozenset()
        self._pieces, self._mask, self._values = pieces, mask, values
        self._ids: dict[str, int] = {}
        self._module = nn.Linear(1, 1)
        self.runs = 0

    @property
    def module(self):
        return self._module

    def encode(self, text):
        found = [m.span() for m in re.finditer(r"\w+|\n|[^\w\s]", text)]
        if self._pieces:
            found = [(i, min(i + self._pieces, b)) for a, b in found for i in range(a, b, self._pieces)]
        ids = [self._ids.setdefault(text[a:b], 3 + len(self._ids)) for a, b in found]
        return Tokens(ids, found)

    def written(self, token):
        return {CLS: "[CLS]", SEP: "[SEP]"}.get(token) or {i: w for w, i in self._ids.items()}[token]

    def _forward(self, tokens, observe):
        self.runs += 1
        assert tokens.shape[0] == 1
        ids = tokens[0].tolist()
        length = len(ids)
        mask = self._mask if self._mask is not None else Causal() if self.causal else None
        for layer, heads in enumerate(self._layers):
            weights = torch.stack([head(ids) for head in heads]).double()
            query = weights.log().clamp(min=-1000)[None]
            key = torch.eye(length, dtype=torch.float64).expand(1, len(heads), length, length)
            value = self._values(layer, length) if self._values else torch.ones(1, len(heads), length, 3).double()
            # What is given as not normalised is not: the mask alone decides what is seen.
            probability = torch.softmax(query[0].masked_fill(~self._dense(mask, length), float("-inf")), -1)
            out = probability[None] @ value
            observe(layer, ObservedCall(query, key, value, mask, scale=1.0, out=out, source="pretend"))

    @staticmethod
    def _dense(mask, length):
        return torch.ones(length, length, dtype=torch.bool) if mask is None else mask.dense(length, length)[0, 0]


def looks_at(targets: Callable[[Sequence[int]], Sequence[int]]) -> Head:
    """A head with all weight of row i on the key targets(ids)[i]."""

    def head(ids):
        weights = torch.zeros(len(ids), len(ids))
        weights[torch.arange(len(ids)), torch.tensor(targets(ids))] = 1
        return weights

    return head


previous = looks_at(lambda ids: [max(i - 1, 0) for i in range(len(ids))])
following = looks_at(lambda ids: [min(i + 1, len(ids) - 1) for i in range(len(ids))])
itself = looks_at(lambda ids: range(len(ids)))
first = looks_at(lambda ids: [0] * len(ids))
last = looks_at(lambda ids: [len(ids) - 1] * len(ids))


def _earlier(ids, i, shift):
    places = [j for j in range(i) if ids[j] == ids[i] and j + shift < i]
    return places[-1] + shift if places else 0


inducing = looks_at(lambda ids: [_earlier(ids, i, 1) for i in range(len(ids))])
duplicating = looks_at(lambda ids: [_earlier(ids, i, 0) for i in range(len(ids))])


def evenly(ids):
    """Looks at everything it sees alike."""
    return torch.full((len(ids), len(ids)), 1 / len(ids))


def randomly(seed: int) -> Head:
    """Some weights, the same for the same length."""

    def head(ids):
        made = torch.Generator().manual_seed(seed * 1009 + len(ids))
        return torch.softmax(3 * torch.randn(len(ids), len(ids), generator=made), -1)

    return head
