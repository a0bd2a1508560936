"""Attention calls that models make without Saccade: seeing them, and answering them in PyTorch's place."""

from __future__ import annotations

from ._calls import Meaning, SdpaCall
from ._replaced import Handler, sdpa_handled_by

__all__ = ["Handler", "Meaning", "SdpaCall", "sdpa_handled_by"]
