"""Watching models that run: every attention call of a model, observed."""

from __future__ import annotations

from ._record import CallRecord, CallSite, GradientRecord
from ._watch import Watched, watch

__all__ = ["CallRecord", "CallSite", "GradientRecord", "Watched", "watch"]
