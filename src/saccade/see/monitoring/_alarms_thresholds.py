"""The thresholds of all alarms, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """The limits at which alarms fire. Each can be changed: `Thresholds(logit=50.0)`.

    Numbers for trained models were measured on the embedded model and on small ones trained for the tests.

    Attributes:
        keys: rows that see fewer keys are left out. Among few keys equal weights and sharp ones hardly differ; 8 keys
            allow an entropy of up to 2.1 nats.
        rows: rows needed for a reading; fewer (decoding) are joined with the rows that follow.
        sharp: a row whose largest weight is at least this is saturated: the softmax's derivative p (1 - p) is below
            0.05, a fifth of its maximum.
        sharp_rows: share of such rows from which a head is saturated. Healthy heads reach it (attending to the previous
            token takes a weight near 1): see `majority`.
        wide: the largest logit of a saturated head whose weights were never even (see `even`): it was saturated from
            the start. Healthy layers stay below: the median head of the embedded model's layers reaches 28, of small
            models after 1,500 steps 34.
        even: the evenness that a head must once have had to count as even before. New heads have 0.8 to 1.
        learned: the largest logit of saturated and collapsed heads that were even before. In a healthy layer all of
            whose heads learned to find one key it reaches 75.
        majority: share of a layer's heads that must be saturated. A single sharp head may have learned a task; half
            of a layer is a problem.
        evenness: entropy over its greatest value, averaged over a layer, at which entropy has collapsed. Zhai et al.
            2023 ("Stabilizing Transformer Training by Preventing Attention Entropy Collapse") see divergence where
            it nears 0; layers of healthy small models keep 0.18.
        fallen: and the largest share of the layer's highest evenness so far that remains.
        logit: the largest logit at which growth raises an alarm: the limit of QK-Clip (Kimi K2, 2025), which
            rescales heads beyond it. Above 128 neighbouring bfloat16 numbers are 1 apart.
        grown: and the factor by which it must exceed the head's lowest value.
        diverging: a logit that alone is an error: runs beyond 10^4 diverged in Wortsman et al. 2023 ("Small-scale
            proxies for large-scale Transformer training instabilities"), which reproduces Dehghani et al. 2023
            ("Scaling Vision Transformers to 22 Billion Parameters") in small models.
        uniform: evenness from which weights count as equal, while another head of the layer is below `formed`. In a new
            model all heads may have equal weights, which is normal.
        formed: see `uniform`.
        flat: or the span of all of a head's logits below which they count as equal: its queries or keys do not differ.
        dead: weight on the same key in all rows, or on the learned sink, from which a head's output does not depend on
            the row. Heads that learned to do nothing (Bondarenko et al. 2023, "Quantizable Transformers") mostly stay
            below, since some of their rows differ.
        silent: output norm, divided by the layer's largest, below which a head adds nothing.
        sink: weight on the first key, or on another that is the same in all rows, from which it is an attention sink
            (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"). Trained models have such
            heads: a note.
        gain: gain of the gradient to queries and keys (see `vanishing_gradients`) below which it has vanished. Even
            heads have about 1 / sqrt(D), 0.06 to 0.5; heads that have learned a task completely, and hardly get a
            gradient, 0.0003.
        clear: consecutive readings without the cause after which an alarm ends.

    Example:
        >>> from saccade.monitoring import Thresholds
        >>> thresholds = Thresholds(logit=50.0)  # saccade.watch(model, alarms=thresholds) takes it
        >>> thresholds.logit, thresholds.keys
        (50.0, 8)
    """

    keys: int = 8
    rows: int = 32
    sharp: float = 0.95
    sharp_rows: float = 0.5
    wide: float = 50.0
    even: float = 0.5
    learned: float = 90.0
    majority: float = 0.5
    evenness: float = 0.1
    fallen: float = 1 / 3
    logit: float = 100.0
    grown: float = 4.0
    diverging: float = 1e4
    uniform: float = 0.999
    formed: float = 0.95
    flat: float = 1e-5
    dead: float = 0.999
    silent: float = 1e-3
    sink: float = 0.5
    gain: float = 1e-4
    clear: int = 3

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a positive finite number, got {value!r}")
