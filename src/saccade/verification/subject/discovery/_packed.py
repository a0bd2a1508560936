"""Functions that take queries, keys and values in one tensor, or keys and values, as (B, L, 3, H, D).

Letters: B batch, H heads, L length, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...findings._finding import Undecided
from .._reading import Reading
from ._signature import TargetArgument

WIDTH, HEADS = 16, 4  # unlike the number of what is packed
# the layout of each of the three, and the axis along which they are stacked
_STACKED = (
    *(("BLHD", 2), ("BHLD", 2), ("BHLD", 0), ("BHLD", 1), ("BLHD", 0), ("BLHD", 3), ("BLHD", 1)),
    *(("BLD", 2), ("BLD", 0), ("BLD", 1)),
)


@dataclass(frozen=True)
class PackedInputs:
    """Calls the target with its last inputs in one tensor: `count` of them, at `axis`, stacked or side by side."""

    count: int
    axis: int
    is_stacked: bool = True

    def __call__(self, target: Any, *places: Any, **keywords: Any) -> Any:
        apart, joined = places[: 3 - self.count], places[3 - self.count : 3]
        packed = (torch.stack if self.is_stacked else torch.cat)(joined, self.axis)
        return target(*apart, packed, *places[3:], **keywords)

    def in_words(self, layout: str, name: str) -> str:
        names = {"B": "batch", "L": "length", "H": "heads", "D": "width"}
        axes = [names[letter] for letter in layout]
        if self.is_stacked:
            axes.insert(self.axis, str(self.count))
        else:
            axes[self.axis] = f"{self.count} x {axes[self.axis]}"
        what = "query, key and value" if self.count == 3 else "key and value"
        return f"{name} is {what} in one tensor ({', '.join(axes)}) (otherwise --adapter)"


def packed_in(arguments: tuple[TargetArgument, ...], has_matrices: bool) -> tuple[str, int] | None:
    """The argument that takes several inputs in one, and how many."""
    roles = [argument.role for argument in arguments]
    if has_matrices:
        return None  # a module that projects takes one sequence under such names
    if roles[:1] == ["packed"]:
        return arguments[0].name, 3
    if roles[:2] == ["query", "key_value"]:
        return arguments[1].name, 2
    return None


def packings(count: int, heads: int | None, layout: str | None) -> Iterator[Reading]:
    for axes, at in _STACKED:
        if layout is None or layout.upper() == axes:
            known = (heads or HEADS) if "H" in axes else 1
            yield Reading("attention", axes, WIDTH, known, call=PackedInputs(count, at))
    if layout is None or layout.upper() == "BLD":
        form, known = ("qkv", heads) if heads else ("attention", 1)
        yield Reading(form, "BLD", 24, known, call=PackedInputs(count, 2, is_stacked=False))  # type: ignore[arg-type]


def unpackable(name: str, count: int, raised: list[str]) -> Undecided:
    """Advice for inputs that fit no known packing: an adapter."""
    given = "query, key, value" if count == 3 else "key, value"
    first = "" if count == 3 else "query, "
    example = f" (one try: {raised[0]})" if raised else ""
    return Undecided(
        f"the argument {name!r} takes {given} in one tensor, and in none of the usual ways{example}; write an "
        f"adapter, with the axes as it takes them:\n"
        f"    def call(target, query, key, value):  # each (batch, heads, length, width)\n"
        f"        return target({first}torch.stack([{given}], dim=2))",
        [("the adapter", "--adapter FILE.py:call")],
    )


_OF_IMAGES = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d)


def takes_images(target: Any) -> bool:
    return isinstance(target, nn.Module) and any(isinstance(module, _OF_IMAGES) for module in target.modules())


def as_sequence() -> Undecided:
    """Advice for a target that takes images: an adapter."""
    return Undecided(
        "it seems to take images (batch, channels, height, width), and what is checked are sequences; write an adapter "
        "that gives it each sequence as an image of one row:\n"
        "    def call(target, x):  # (batch, length, channels)\n"
        "        out = target(x.transpose(1, 2).unsqueeze(2))\n"
        "        out = out[0] if isinstance(out, tuple) else out\n"
        "        return out.squeeze(2).transpose(1, 2)",
        [("the adapter", "--adapter FILE.py:call")],
    )
