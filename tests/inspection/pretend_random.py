"""Models with habits and a lot of noise, of every kind: that look ahead, with special tokens around a text or none."""

from __future__ import annotations

import torch
from pretend_lm import PretendText, broad, duplicate, following, itself, last, previous, repeat, sink

TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "When the rain came, the old house was dark; when the sun came, the old man was gone.",
    "a b a b a c a b.",
    "Nobody!",
    "Well, well,\nwell: 'tis Anne, Anne's Anne.",
]
AHEAD = {"before": ("[CLS]",), "after": ("[SEP]",)}
NOTHING = {"before": (), "after": (), "causal": True}
ENDING = {"before": (), "after": ("</s>",)}  # T5's encoder
PAIR = {"before": ("[CLS]",), "after": ("[SEP]", "[SEP]")}
KINDS = {"ahead": AHEAD, "nothing": NOTHING, "ending": ENDING, "pair": PAIR}


def later_duplicate(tokens):
    out = duplicate(tokens)
    tokens = tokens.tolist()
    for i, token in enumerate(tokens):
        after = [j for j in range(i + 1, len(tokens)) if tokens[j] == token and token < PretendText.SPECIAL]
        if after:
            out[i], out[i, after[0]] = 0, 60
    return out


def random_model(seed, kind, size=1000):
    def noisy(habit, strength, number):
        def pattern(tokens):
            draw = torch.Generator().manual_seed(1000 * seed + number)
            return habit(tokens) / 60 * strength + 3 * torch.randn(len(tokens), len(tokens), generator=draw)

        return pattern

    habits = [previous, itself, sink, broad, later_duplicate, repeat, following, last]
    layers = [[noisy(h, 5 + i, i) for i, h in enumerate(habits)], [noisy(h, 10, 50 + i) for i, h in enumerate(habits)]]
    layers[1] = layers[1][:5]  # layers may differ in heads
    return PretendText(layers, size=size, **KINDS[kind])
