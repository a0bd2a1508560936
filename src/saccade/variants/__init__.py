"""Attention in other forms: exact sparse patterns, and mechanisms in the place of softmax attention."""

from __future__ import annotations

from . import feature_maps
from ._mechanism import Heads, Mechanism, MechanismConfig, Recurrent, State, Traits
from ._shown import Shown, shown
from .linear import LinearAttention, LinearConfig, LinearState, linear_attention, linear_step
from .reformer import ReformerAttention, ReformerConfig, lsh_attention

__all__ = [
    "MECHANISMS",
    "Heads",
    "LinearAttention",
    "LinearConfig",
    "LinearState",
    "Mechanism",
    "MechanismConfig",
    "Recurrent",
    "ReformerAttention",
    "ReformerConfig",
    "Shown",
    "State",
    "Traits",
    "feature_maps",
    "linear_attention",
    "linear_step",
    "lsh_attention",
    "shown",
]

MECHANISMS: tuple[type[MechanismConfig], ...] = (LinearConfig, ReformerConfig)
"""Every mechanism there is, in the order of the table."""
