"""Speed and memory of attention, measured: what `saccade bench` is made of.

    group = measure("mine", [Entry(case, Ours("auto")), Entry(case, Sdpa())], Settings(threads=2))
    group.speedup(group.rows[0], over=group.rows[1]).median

A contender's result is checked before it is timed; contenders take turns; ratios are medians of ratios of readings of
the same round.
"""

from __future__ import annotations

from .cases import Case, Inputs
from .contenders import Contender, Dense, Flex, Ours, Sdpa
from .measuring import Entry, Settings, measure
from .results import Group, Memory, Outcome, Report, Row
from .statistics import Quartiles, exponent, paired_ratio, quartiles
from .timing import Budget

__all__ = [
    "Budget",
    "Case",
    "Contender",
    "Dense",
    "Entry",
    "Flex",
    "Group",
    "Inputs",
    "Memory",
    "Ours",
    "Outcome",
    "Quartiles",
    "Report",
    "Row",
    "Sdpa",
    "Settings",
    "exponent",
    "measure",
    "paired_ratio",
    "quartiles",
]
