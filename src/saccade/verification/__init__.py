"""Verifying any implementation of attention against the contract: what it breaks, where, and how to fix it.

Begin with `_verify.py`. Seven rooms, each of which imports only those before it: `findings` (the messages), `subject`
(finding, reading and calling what is verified), `tracing` (what happens inside a call), `checks`, `running` (a process
of its own, time, deaths), `report` and `stacks` (models with what stands around them). From outside it imports the
operator and `interception`; models are opened and recognised by `integrations._verification`, which `saccade`
registers.
"""

from __future__ import annotations

from ._verified import StackError, verified
from ._verify import assert_correct, verify
from ._verify_stack import StackReport, verify_stack
from .findings._finding import (
    Finding,
    Inapplicable,
    Location as Location,
    Outcome as Outcome,
    TargetError as TargetError,
    Undecided,
)
from .report._html import as_page
from .report._json import as_json
from .report._junit import as_junit
from .report._report import Report
from .report._text import report_lines as report_lines
from .running._child import Limits
from .subject._check import Check
from .subject._reading import CacheReading as CacheReading, Hints, MaskReading, Promise, Reading

__all__ = [
    "Check",
    "Finding",
    "Hints",
    "Inapplicable",
    "Limits",
    "MaskReading",
    "Promise",
    "Reading",
    "Report",
    "StackError",
    "StackReport",
    "Undecided",
    "as_json",
    "as_junit",
    "as_page",
    "assert_correct",
    "verified",
    "verify",
    "verify_stack",
]
