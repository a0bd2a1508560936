"""Attention over the pixels of images, as in SAGAN (arXiv 1805.08318): called through an adapter."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._finding import Undecided

_OF_IMAGES = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d)


def takes_images(target: Any) -> bool:
    return isinstance(target, nn.Module) and any(isinstance(one, _OF_IMAGES) for one in target.modules())


def as_sequence() -> Undecided:
    """What to do with one that takes images: an adapter."""
    return Undecided(
        "it seems to take images (batch, channels, height, width), and what is checked are sequences; write an adapter "
        "that gives it each sequence as an image of one row:\n"
        "    def call(target, x):  # (batch, length, channels)\n"
        "        out = target(x.transpose(1, 2).unsqueeze(2))\n"
        "        out = out[0] if isinstance(out, tuple) else out\n"
        "        return out.squeeze(2).transpose(1, 2)",
        [("the adapter", "--adapter FILE.py:call")],
    )
