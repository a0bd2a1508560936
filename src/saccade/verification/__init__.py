"""Verifying any implementation of attention against the contract: what it breaks, where, and how to mend it."""

from __future__ import annotations

from ._finding import Check, Finding, Inapplicable, Location, Outcome, Report, TargetError, Undecided
from ._reading import CacheReading, MaskReading, Promise, Reading

__all__ = [
    "CacheReading",
    "Check",
    "Finding",
    "Inapplicable",
    "Location",
    "MaskReading",
    "Outcome",
    "Promise",
    "Reading",
    "Report",
    "TargetError",
    "Undecided",
]
