"""Heads of a model that runs, changed: `saccade.intervene` and the edits it takes.

Begin with `_intervene.py` (which calls), then `_edits.py` (what is done to them) and `_answer.py` (how a call with
edits is computed). Imports `monitoring`, whose hooks meet the calls.
"""

from __future__ import annotations

from ._edits import Ablate, Bias, Mask, Scale, Weights
from ._intervene import Intervention, intervene
from ._patch import Freeze, Patch

__all__ = ["Ablate", "Bias", "Freeze", "Intervention", "Mask", "Patch", "Scale", "Weights", "intervene"]
