"""The learning rate over time."""

from __future__ import annotations

import math


def learning_rate(step: float, *, peak: float, steps: float, warmup: int, floor: float = 0.1) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down. Loshchilov and Hutter, "SGDR" (2017).

    Args:
        step: counted from 0: the step about to be made.
        peak: the highest rate, reached after `warmup` steps.
        steps: where the cosine ends; may be infinite.
        warmup: steps of the warm-up.
        floor: the last rate as a share of `peak`.

    Example:
        >>> import saccade
        >>> rates = [saccade.training.learning_rate(step, peak=1.0, steps=100, warmup=4) for step in (0, 1, 4, 100)]
        >>> [round(rate, 2) for rate in rates]
        [0.25, 0.5, 1.0, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
