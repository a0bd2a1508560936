"""Attention calls that models make to PyTorch or transformers: observing them, and computing them instead.

Begin with `_replaced.py`, which replaces functions of PyTorch; `_flex.py` exchanges the code of one; `transformers`
does it for that library. `_modules.py` observes calls of modules.
Imports the record of a call and masks.
"""

from __future__ import annotations

from ._calls import SdpaCall, SdpaMeaning
from ._checkpoints import checkpoints_wrapped_by
from ._flex import FlexCall, flex_handled_by
from ._modules import hooked
from ._replaced import Handler, mha_handled_by, sdpa_handled_by

__all__ = [
    "FlexCall",
    "Handler",
    "SdpaCall",
    "SdpaMeaning",
    "checkpoints_wrapped_by",
    "flex_handled_by",
    "hooked",
    "mha_handled_by",
    "sdpa_handled_by",
]
