"""When alarms fire: every threshold with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """When an alarm fires. Every number may be given another value: `Thresholds(logit=50.0)`.

    Statements about trained models were measured on the embedded model and on small ones trained for the tests.

    Attributes:
        keys: rows that see fewer keys are left out. Among few keys an even head is as good as a sharp one; 8 keys
            leave an entropy of up to 2.1 nats to lose.
        rows: how many rows make a reading; fewer (decoding) are put together with those that follow.
        sharp: a row whose largest weight is at least this is saturated: the softmax's derivative p (1 - p) is below
            0.05, a fifth of what it is at most.
        sharp_rows: share of such rows from which a head is saturated. Healthy heads reach it (looking at the
            previous token takes a weight near 1): see `majority`.
        wide: the largest logit of a saturated head that never was even (see `even`): it did not learn that, it began
            so. Healthy layers stay below: the median head of the embedded model's layers reaches 28, of small models
            after 1,500 steps 34.
        even: the highest evenness so far of a head that was even once. New heads have 0.8 to 1.
        learned: the largest logit of saturated and collapsed heads that were even once. A layer all of whose heads
            learned to find one key reaches 75, in the best of health.
        majority: share of a layer's heads that must be saturated. One sharp head is a head with a task; when half
            of a layer is, it is the layer.
        evenness: entropy over its greatest value, averaged over a layer, at which entropy has collapsed. Zhai et al.
            2023 ("Stabilizing Transformer Training by Preventing Attention Entropy Collapse") see divergence where
            it nears 0; layers of healthy small models keep 0.18.
        fallen: and what remains, at most, of the layer's highest evenness so far.
        logit: the largest logit at which growth raises an alarm: the limit of QK-Clip (Kimi K2, 2025), which
            rescales heads beyond it. Above 128 neighbouring bfloat16 numbers are 1 apart.
        grown: and how many times the head's lowest it must be.
        diverging: a logit that alone is an error: runs beyond 10^4 diverged in Wortsman et al. 2023 ("Small-scale
            proxies for large-scale Transformer training instabilities"), where Dehghani et al. 2023 ("Scaling Vision
            Transformers to 22 Billion Parameters") is seen again in small models.
        uniform: evenness of a head that looks at all keys alike, while another head of its layer is below `formed`.
            In a model that has just begun all heads may be that even, and that is no fault.
        formed: see `uniform`.
        flat: or a span of all of a head's logits below this: its queries or keys do not differ at all.
        dead: weight on one and the same key in all rows, or on the learned sink, from which a head's output says
            nothing about the row. Heads that learned to do nothing (Bondarenko et al. 2023, "Quantizable
            Transformers") mostly stay below, since some of their rows do differ.
        silent: output norm, over the layer's largest, below which a head adds nothing.
        sink: weight on the first key, or on another that is the same in all rows, at which most of the attention goes
            to a sink (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"). Trained models
            have such heads: a note.
        gain: what comes through of the gradient to queries and keys (see `vanishing_gradients`) below which it has
            vanished. Even heads have about 1 / sqrt(D), 0.06 to 0.5; those that have learned a task to the end, and
            get hardly any gradient for it, 0.0003.
        clear: readings in a row without the cause after which an alarm is over.

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
