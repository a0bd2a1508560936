"""Heads of a running model, changed: `saccade.intervene` and its edits.

Begin with `_intervene.py` (the calls), then `_edits.py` (the edits) and `_answer.py` (how a call with edits is
computed). Imports `monitoring`, whose hooks observe the calls.
"""

from __future__ import annotations

from ._edits import Ablate, EditBias, EditMask, Scale, Weights
from ._intervene import Intervention as Intervention, intervene
from ._patch import Freeze, Patch

__all__ = ["Ablate", "EditBias", "EditMask", "Freeze", "Patch", "Scale", "Weights", "intervene"]

RENAMED = {"Bias": "EditBias", "Mask": "EditMask"}

TYPE_CHECKING = False
if not TYPE_CHECKING:
    from ...support._lazy_names import lazy_names

    __getattr__ = lazy_names(__name__, {}, RENAMED)
