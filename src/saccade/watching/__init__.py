"""Watching models that run: every attention call of a model, observed."""

from __future__ import annotations

from ._alarms import Alarm, Alarms
from ._alarms_thresholds import Thresholds
from ._record import CallRecord, CallSite, GradientRecord
from ._watch import Watched, watch

__all__ = ["Alarm", "Alarms", "CallRecord", "CallSite", "GradientRecord", "Thresholds", "Watched", "watch"]
