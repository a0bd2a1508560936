"""A language model whose attention is known: every head follows a written pattern, exactly."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import torch

import saccade
from saccade.inspection import TextModel, Tokens
from saccade.nn import Observation
from saccade.operator._call import ObservedCall

ALWAYS = 60.0  # a logit so large that nothing else gets weight


def previous(tokens):
    return ALWAYS * torch.diag(torch.ones(len(tokens) - 1), -1)


def itself(tokens):
    return ALWAYS * torch.eye(len(tokens))


def sink(tokens):
    out = torch.zeros(len(tokens), len(tokens))
    out[:, 0] = ALWAYS
    return out


def broad(tokens):
    return torch.zeros(len(tokens), len(tokens))


def duplicate(tokens):
    """The last earlier occurrence of the token, the first token where there is none."""
    return _earlier(tokens, 0)


def repeat(tokens):
    """The token after the last earlier occurrence, the first token where there is none."""
    return _earlier(tokens, 1)


def mostly_first_word(tokens):
    """Half of the weight on position 1, the rest on everything alike."""
    out = torch.zeros(len(tokens), len(tokens))
    out[:, 1] = torch.log(torch.arange(len(tokens)).clamp(min=1).float())
    return out


def _earlier(tokens, shift):
    out = torch.zeros(len(tokens), len(tokens))
    tokens = tokens.tolist()
    for i, token in enumerate(tokens):
        before = [j for j in range(1, i) if tokens[j] == token and j + shift <= i]
        out[i, before[-1] + shift if before else 0] = ALWAYS
    return out


def following(tokens):
    return ALWAYS * torch.diag(torch.ones(len(tokens) - 1), 1)


def last(tokens):
    out = torch.zeros(len(tokens), len(tokens))
    out[:, -1] = ALWAYS
    return out


def at_ids(ids):
    """A head that shares its weight among the tokens with these ids, the first token where there is none."""

    def pattern(tokens):
        out = torch.zeros(len(tokens), len(tokens))
        out[:, 0] = ALWAYS / 2
        out[:, torch.isin(tokens, torch.tensor(sorted(ids)))] = ALWAYS
        return out

    return pattern


class Pieces:
    """Words cut into pieces of at most ``size`` characters; a blank belongs to the piece after it."""

    start = 0

    def __init__(self, size: int = 1000):
        self.size, self.table = size, {"<s>": 0}

    def encode(self, text):
        spans = []
        for m in re.finditer(r" ?[^\W_]+| ?[\W_]", text):
            spans += [(i, min(i + self.size, m.end())) for i in range(m.start(), m.end(), self.size)]
        ids = [self.table.setdefault(text[a:b].strip(" ") or " ", len(self.table)) for a, b in spans]
        return SimpleNamespace(ids=ids, spans=spans)

    def decode(self, ids):
        names = {i: piece for piece, i in self.table.items()}
        return " ".join(names[i] for i in ids)


class _Decoder(torch.nn.Module):
    def __init__(self, patterns, context):
        super().__init__()
        self.patterns = patterns
        self.nothing = torch.nn.Parameter(torch.zeros(1))
        layers, heads = len(patterns), len(patterns[0])
        self.config = SimpleNamespace(
            layers=layers, heads=heads, heads_by_layer=(heads,) * layers, context=context, vocabulary=97, mechanism=None
        )

    def forward(self, tokens, *, cache=None, observe=None):
        assert tokens.shape[1] <= self.config.context
        length = tokens.shape[1]
        key = torch.eye(length).expand(len(tokens), self.config.heads, length, length)
        for layer, heads in enumerate(self.patterns):
            logits = torch.stack([torch.stack([head(row) for head in heads]) for row in tokens])
            query = logits * math.sqrt(length)
            observe(layer, Observation(query, key, key, saccade.Causal(), out=query, source="pretended"))
        return torch.zeros(*tokens.shape, 97)


class PretendLM:
    """``patterns[layer][head](tokens (L,)) -> logits (L, L)``; later keys are masked as in any causal model."""

    def __init__(self, patterns, context=257, size=1000):
        self.model = _Decoder(patterns, context)
        self.tokenizer = Pieces(size)
        self.heads = None


class PretendText(TextModel):
    """The same patterns in a model that may look ahead, with special tokens around the text or none.

    ``patterns[layer]`` may have different numbers of heads. Special tokens have the ids ``SPECIAL`` and up.
    """

    SPECIAL = 10_000

    def __init__(self, patterns, *, causal=False, before=("[CLS]",), after=("[SEP]",), context=700, size=1000):
        names = [*before, *after]
        self.name, self.patterns, self.causal, self.context = "pretended", patterns, causal, context
        self.heads = tuple(len(heads) for heads in patterns)
        self.names = {self.SPECIAL + i: name for i, name in enumerate(dict.fromkeys(names))}
        ids = {name: i for i, name in self.names.items()}
        self.before, self.after = tuple(ids[name] for name in before), tuple(ids[name] for name in after)
        self.special = frozenset(self.names)
        self.pieces = Pieces(size)
        self._module = torch.nn.Linear(1, 1)

    @property
    def module(self):
        return self._module

    def encode(self, text):
        found = self.pieces.encode(text)
        return Tokens(found.ids, found.spans)

    def written(self, token):
        return self.names[token]

    def _forward(self, tokens, observe):
        length = tokens.shape[1]
        assert length <= self.context
        for layer, heads in enumerate(self.patterns):
            key = torch.eye(length).expand(len(tokens), len(heads), length, length)
            query = torch.stack([torch.stack([head(row) for head in heads]) for row in tokens])
            mask = saccade.Causal() if self.causal else None
            observe(layer, ObservedCall(query, key, key, mask, scale=1.0, out=query, source="pretended"))
