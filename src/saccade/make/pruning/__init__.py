"""Permanent removal of attention heads: `saccade.prune`.

Begin with `_entry.py`, then `_prune.py`; `_layers.py` finds the attention layers of a model, `_choice.py` selects heads
to remove. `operator/nn/_fewer_heads.py` plans which rows and columns stay, `commit` in `_cuts.py` beside it cuts the
tensors and an optimizer's state. Imports `attribution`, `models` and `nn`. Names are imported when they are first used,
as those of `saccade` are.
"""

from __future__ import annotations

__all__ = [
    "Pruning",
    "attention_flops",
    "choose_heads",
    "prune",
]

_HOMES = {
    "Comparison": "_compare",
    "PrunedLayer": "_report",
    "PrunedMultiheadAttention": "_torch",
    "Pruning": "_report",
    "attention_flops": "_report",
    "choose_heads": "_choice",
    "compare_pruned": "_compare",
    "prune": "_entry",
}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._choice import choose_heads
    from ._compare import Comparison as Comparison, compare_pruned as compare_pruned
    from ._entry import prune
    from ._report import PrunedLayer as PrunedLayer, Pruning, attention_flops
    from ._torch import PrunedMultiheadAttention as PrunedMultiheadAttention
else:
    from ...support._lazy_names import lazy_names

    __getattr__ = lazy_names(__name__, _HOMES)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
