"""A textbook multi-head module as a text, so that tests can break one of its lines and see which is blamed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

HEADS, WIDTH = 3, 21  # heads of width 7

TEXT = """
import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model=21, heads=3, dropout=0.1):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, self.d_k).transpose(1, 2)

    def forward(self, x, mask=None):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores = scores / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        dropped = self.dropout(weights)
        out = torch.matmul(dropped, v)
        out = out.transpose(1, 2).reshape(x.shape)
        return self.out_proj(out), weights
"""


def module(folder: Path, old: str = "", new: str = "", **arguments: Any) -> Any:
    """An instance of the module with one piece of its text replaced, in eval mode, from a file in `folder`."""
    assert TEXT.count(old) == 1 or not old, old
    path = folder / "textbook_module.py"
    path.write_text(TEXT.replace(old, new) if old else TEXT, encoding="utf-8")
    name = f"_textbook_{abs(hash((str(folder), old, new)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[name]
    return made.MultiHeadAttention(**arguments).eval()
