"""Verifying any implementation of attention against the contract: what it breaks, where, and how to mend it."""

from __future__ import annotations

from ._child import Limits
from ._finding import Check, Finding, Inapplicable, Location, Outcome, Report, TargetError, Undecided
from ._reading import CacheReading, Hints, MaskReading, Promise, Reading
from ._verify import assert_correct, verify

__all__ = [
    "CacheReading",
    "Check",
    "Finding",
    "Hints",
    "Inapplicable",
    "Limits",
    "Location",
    "MaskReading",
    "Outcome",
    "Promise",
    "Reading",
    "Report",
    "TargetError",
    "Undecided",
    "assert_correct",
    "verify",
]
