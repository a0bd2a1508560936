"""What the heads of a model are for, measured.

`_importance.py`: what the loss hangs on; `_patching.py`: which heads carry what differs between two inputs. Both run
the model with edits of its calls (`_runs.py`) and give a number for each head (`_heads.py`).
"""

from __future__ import annotations

from ._heads import CallHeads, Head, HeadMap
from ._importance import head_importance
from ._importance_result import HeadImportance, Removal
from ._patching import patching
from ._patching_result import Agreement, Patching

__all__ = [
    "Agreement",
    "CallHeads",
    "Head",
    "HeadImportance",
    "HeadMap",
    "Patching",
    "Removal",
    "head_importance",
    "patching",
]
