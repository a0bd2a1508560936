"""Attention in other forms: exact sparse patterns, and mechanisms in the place of softmax attention."""

from __future__ import annotations

from . import feature_maps
from ._mechanism import Heads, Mechanism, MechanismConfig, Recurrent, State, Traits
from ._shown import Shown, shown
from .linear import LinearAttention, LinearConfig, LinearState, linear_attention, linear_step
from .performer import PerformerAttention, PerformerConfig, PerformerState, performer_attention
from .random_features import draw_projection, random_features
from .reformer import ReformerAttention, ReformerConfig, lsh_attention

__all__ = [
    "MECHANISMS",
    "Heads",
    "LinearAttention",
    "LinearConfig",
    "LinearState",
    "Mechanism",
    "MechanismConfig",
    "PerformerAttention",
    "PerformerConfig",
    "PerformerState",
    "Recurrent",
    "ReformerAttention",
    "ReformerConfig",
    "Shown",
    "State",
    "Traits",
    "draw_projection",
    "feature_maps",
    "linear_attention",
    "linear_step",
    "lsh_attention",
    "performer_attention",
    "random_features",
    "shown",
]

MECHANISMS: tuple[type[MechanismConfig], ...] = (
    LinearConfig,
    PerformerConfig,
    ReformerConfig,
)
"""Every mechanism there is, in the order of the table."""
