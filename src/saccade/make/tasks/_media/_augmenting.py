"""Training data changed at random: images, a whole batch at once, and sounds, one at a time.

Shape legend: B images of a batch, C channels, H height, W width; S samples.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.signals.sound import Samples


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """The limits of random changes of training images; each draw is uniform.

    Args:
        shift: share of a side by which an image is moved at most, in whole pixels.
        rotate: degrees by which it is turned at most.
        zoom: share by which it is enlarged or made smaller at most.
        flip: whether half of the images are mirrored, left to right.
    """

    shift: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    flip: bool = False

    def __post_init__(self) -> None:
        for name, end in (("shift", 1), ("rotate", 360), ("zoom", 1)):
            value = getattr(self, name)
            if not 0 <= value < end:
                raise ValueError(f"{name}: must be in [0, {end}), got {value}")

    def __call__(self, values: Tensor, random: np.random.Generator) -> Tensor:
        """Images (B, C, H, W), each changed by separate random numbers; pixels from outside the image repeat its
        border."""
        if self == Augmentation():
            return values
        grid = F.affine_grid(self._maps(values, random), list(values.shape), align_corners=False)
        return F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=False)

    def _maps(self, values: Tensor, random: np.random.Generator) -> Tensor:
        """(B, 2, 3): where each pixel comes from, in coordinates from -1 to 1 along both sides."""
        count, _, height, width = values.shape
        turn = np.deg2rad(self.rotate) * random.uniform(-1, 1, count)
        larger = np.exp(math.log1p(self.zoom) * random.uniform(-1, 1, count))
        sides = np.array([width, height])
        moved = np.round(self.shift * sides * random.uniform(-1, 1, (count, 2))) * 2 / sides
        mirror = np.where(random.random(count) < 0.5, -1.0, 1.0) if self.flip else np.ones(count)
        cos, sin, aspect = np.cos(turn) / larger, np.sin(turn) / larger, height / width
        rows = [[mirror * cos, -sin * aspect, moved[:, 0]], [mirror * sin / aspect, cos, moved[:, 1]]]
        return torch.from_numpy(np.array(rows).transpose(2, 0, 1)).to(values)


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
