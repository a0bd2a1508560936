"""Verifying any implementation of attention against the contract: what it breaks, where, and how to mend it."""

from __future__ import annotations

from ._child import Limits
from ._finding import Check, Finding, Inapplicable, Location, Outcome, Report, TargetError, Undecided
from ._json import as_json
from ._junit import as_junit
from ._page import as_page
from ._reading import CacheReading, Hints, MaskReading, Promise, Reading
from ._show import report_lines
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
    "as_json",
    "as_junit",
    "as_page",
    "assert_correct",
    "report_lines",
    "verify",
]
