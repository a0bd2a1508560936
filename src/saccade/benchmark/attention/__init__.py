"""Measures the speed of attention; the implementation of `saccade bench`.

    entries = [Entry(case, SaccadeAttention("auto")), Entry(case, SdpaAttention())]
    group = measure("mine", entries, MeasurementSettings(threads=2))
    group.speedup(group.rows[0], over=group.rows[1]).median

Results are checked before timing; contenders are timed alternately; ratios are medians of ratios within a round.
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
