"""Positions: ways of telling attention where a token stands."""

from __future__ import annotations

from .rotary import Rotary

__all__ = ["Rotary"]
