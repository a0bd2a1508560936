"""Observing every attention call of a running model.

Begin with `_watch.py`; `calls` observes the calls, `_observe.py` measures them, `_alarms.py` reports problems, and
`_monitor.py` logs a training, and `_stack_monitor.py` verifies its stack. Imports the record of a call, weights and
statistics, `_tracing`, `_hooks` and `verification`.
"""

from __future__ import annotations

from ._aggregates import Aggregate as Aggregate
from ._alarms import Alarm, Alarms
from ._alarms_thresholds import Thresholds
from ._kept_calls import KeptCall as KeptCall
from ._monitor import AttentionMonitor, MonitorSettings
from ._monitor_log import Histogram, MonitorLog, TensorBoardLog
from ._observations import Observations, load
from ._record import (
    CallRecord as CallRecord,
    CallSite as CallSite,
    GradientRecord as GradientRecord,
    Unobserved as Unobserved,
)
from ._stack_monitor import StackMonitor
from ._watch import ModelWatch as ModelWatch, watch

__all__ = [
    "Alarm",
    "Alarms",
    "AttentionMonitor",
    "Histogram",
    "MonitorLog",
    "MonitorSettings",
    "Observations",
    "StackMonitor",
    "TensorBoardLog",
    "Thresholds",
    "load",
    "watch",
]
