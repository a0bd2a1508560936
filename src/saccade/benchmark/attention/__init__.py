"""Speed of attention, measured: what `saccade bench` is made of.

    entries = [Entry(case, SaccadeAttention("auto")), Entry(case, SdpaAttention())]
    group = measure("mine", entries, MeasurementSettings(threads=2))
    group.speedup(group.rows[0], over=group.rows[1]).median

A contender's result is checked before it is timed; contenders take turns; ratios are medians of ratios of readings of
the same round.
"""

from __future__ import annotations

from .cases import Case, CaseInputs
from .contenders import Contender, DenseAttention, FlexAttention, SaccadeAttention, SdpaAttention
from .measuring import Entry, MeasurementSettings, measure
from .results import BenchmarkReport, Measurement, MeasurementGroup
from .statistics import Quartiles, exponent, paired_ratio, quartiles
from .timing import Budget

__all__ = [
    "BenchmarkReport",
    "Budget",
    "Case",
    "CaseInputs",
    "Contender",
    "DenseAttention",
    "Entry",
    "FlexAttention",
    "Measurement",
    "MeasurementGroup",
    "MeasurementSettings",
    "Quartiles",
    "SaccadeAttention",
    "SdpaAttention",
    "exponent",
    "measure",
    "paired_ratio",
    "quartiles",
]
