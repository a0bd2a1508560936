"""The learning rate over time."""

from __future__ import annotations

import math


def learning_rate(step: float, *, peak: float, steps: float, warmup: int, floor: float = 0.1) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to `floor * peak` at step `steps`.

    `step` counts from 0 and means the step about to be made; `steps` may be infinite. Loshchilov and Hutter, "SGDR"
    (2017).
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
