"""Looks to show: a model with a few habits, its roles written by hand."""

from __future__ import annotations

import torch
from pretend_lm import PretendLM, broad, itself, previous, repeat, sink

from saccade.inspection import look

SHORT = "The cat sat on the mat, and the dog sat on the cat."
LONG = " ".join(f"{a}{b}" for a in ("wax", "candle", "moor", "ivy") for b in range(37)) + "."


def uneven(habit, seed):
    def pattern(tokens):
        noise = torch.randn(len(tokens), len(tokens), generator=torch.Generator().manual_seed(seed))
        return habit(tokens) / 12 + 2 * noise

    return pattern


def make(text=SHORT, *, layers=2, roles=True, head=None, source="", rows=None):
    heads = [previous, repeat, sink, itself, broad]
    lm = PretendLM([[uneven(h, 11 * i + j) for j, h in enumerate(heads)] for i in range(layers)], context=701)
    if roles:
        names = ["previous", "repeat", "sink", "self", "mixed"]
        lm.heads = {
            "rules": [{"roles": ["broad"], "at_least": 0.8, "measured_on": "held-out text"}],
            "text": {"tokens": 4080},
            "heads": [
                {"layer": i, "head": j, "role": n, "decided_by": "sink" if n == "mixed" else n, "score": 0.62}
                for i in range(layers)
                for j, n in enumerate(names)
            ],
        }
    return look(lm, text, head, source=source, rows=rows)
