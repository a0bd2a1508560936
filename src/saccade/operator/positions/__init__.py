"""Positions: ways to give attention the positions of tokens.

Added to embeddings: `Sinusoidal`, `Learned`. Turning queries and keys: `Rotary`. Added to logits: `AlibiBias`,
`T5Bias`. Frozen values that name one of the last three in a configuration: `RotaryConfig`, `AlibiConfig`, `T5Config`.
Begin with `rotary.py`. Imports biases and masks.
"""

from __future__ import annotations

from .biases import AlibiBias, T5Bias
from .configs import AlibiConfig, Config as Config, RotaryConfig, T5Config
from .learned import Learned
from .offsets import Offset as Offset, places
from .rotary import Rotary
from .scaling import LinearScaling, Llama3Scaling, NTKScaling, YaRNScaling
from .sinusoidal import Sinusoidal

__all__ = [
    "AlibiBias",
    "AlibiConfig",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "Rotary",
    "RotaryConfig",
    "Sinusoidal",
    "T5Bias",
    "T5Config",
    "YaRNScaling",
    "places",
]
