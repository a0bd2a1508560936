"""Attention calls that models make without Saccade: seeing them, and answering them in PyTorch's place."""

from __future__ import annotations

from ._calls import Meaning, SdpaCall
from ._replaced import Handler, mha_handled_by, sdpa_handled_by

__all__ = ["Handler", "Meaning", "SdpaCall", "mha_handled_by", "sdpa_handled_by"]
