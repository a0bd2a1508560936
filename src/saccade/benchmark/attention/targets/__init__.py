"""The speeds that the native kernels are held to, for `saccade bench --targets`.

Begin with `catalogue.py`; `requirements.py` is what may be asked, `arithmetic.py` what arithmetic allows of what is
missed, `judging.py` how a run comes about.
"""

from __future__ import annotations

from .catalogue import MedianTarget, PerformanceTarget, TargetPreset, medians, targets
from .judging import hold_to

__all__ = ["MedianTarget", "PerformanceTarget", "TargetPreset", "hold_to", "medians", "targets"]
