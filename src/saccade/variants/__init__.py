"""Attention in other forms: exact sparse patterns, and mechanisms in the place of softmax attention."""

from __future__ import annotations

from ._mechanism import Heads, Mechanism, MechanismConfig, Recurrent, State, Traits
from ._shown import Shown, shown

__all__ = ["MECHANISMS", "Heads", "Mechanism", "MechanismConfig", "Recurrent", "Shown", "State", "Traits", "shown"]

MECHANISMS: tuple[type[MechanismConfig], ...] = ()
"""Every mechanism there is, in the order of the table."""
