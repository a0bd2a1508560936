"""What is refused, and by what name."""

from __future__ import annotations


class UnknownAttention(ValueError):
    """An attention call that asks for something which has no meaning here; the message names it."""
