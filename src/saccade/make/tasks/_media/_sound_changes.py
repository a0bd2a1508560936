"""Sounds made faster or slower, shifted and covered with noise at random, one at a time.

Shape legend: S samples.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ...models.signals.sound import Samples


@dataclasses.dataclass(frozen=True)
class SoundChanges:
    """The limits of random changes of training sounds; each draw is uniform.

    Args:
        speed: share by which a sound is made faster or slower at most, its pitch with it (Ko et al., "Audio
            Augmentation for Speech Recognition", 2015).
        shift: seconds of silence that are put before and behind it at most.
        noise: deviation of white noise that is added, at most, as a share of the sound's own.
    """

    speed: float = 0.0
    shift: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        for name, end in (("speed", 1), ("shift", 60), ("noise", 10)):
            value = getattr(self, name)
            if not 0 <= value < end:
                raise ValueError(f"{name}: must be in [0, {end}), got {value}")

    def __call__(self, samples: Samples, rate: int, random: np.random.Generator) -> Samples:
        """(S,) to another length."""
        faster = math.exp(math.log1p(self.speed) * random.uniform(-1, 1))
        before, behind = (int(self.shift * rate * random.uniform(0, 1)) for _ in range(2))
        samples = np.pad(at_speed(samples, faster), (before, behind))
        loud = self.noise * random.uniform(0, 1) * float(samples.std())
        return (samples + loud * random.standard_normal(len(samples))).astype(np.float32) if loud else samples


def at_speed(samples: Samples, faster: float) -> Samples:
    """`samples` interpolated linearly at steps of `faster`; the first and the last stay."""
    count = max(round(len(samples) / faster), 1)
    if count == len(samples):
        return samples
    places = np.linspace(0, len(samples) - 1, count)
    return np.interp(places, np.arange(len(samples)), samples).astype(np.float32)
