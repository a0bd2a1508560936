"""Heads removed for good: `saccade.prune`.

Begin with `_prune.py`; `_layers.py` finds the attention of a model, `_choice.py` says which of them can go. Imports
`attribution`, `models` and `nn`.
"""

from __future__ import annotations

from ._choice import choose_heads
from ._compare import Comparison, compare_pruned
from ._prune import prune
from ._report import PrunedLayer, Pruning, attention_flops
from ._torch import PrunedMultiheadAttention

__all__ = [
    "Comparison",
    "PrunedLayer",
    "PrunedMultiheadAttention",
    "Pruning",
    "attention_flops",
    "choose_heads",
    "compare_pruned",
    "prune",
]
