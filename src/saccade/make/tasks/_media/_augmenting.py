"""Images moved, turned, zoomed and mirrored at random, a whole batch at once.

Shape legend: B images of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


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
