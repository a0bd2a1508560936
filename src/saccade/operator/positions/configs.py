"""Position schemes of attention as values: a configuration holds one, and builds its module.

Shape legend: Hq query heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from .biases import AlibiBias, T5Bias, check_buckets, check_flag
from .rotary import Layout, Rotary, check_rotary
from .scaling import Scaling


@dataclass(frozen=True)
class RotaryConfig:
    """Configuration of `Rotary` positions, with the same fields, for `saccade.nn.AttentionConfig`.

    Example:
        >>> import torch, saccade
        >>> config = saccade.nn.AttentionConfig(32, heads=4, positions=saccade.positions.RotaryConfig(base=500000.0))
        >>> saccade.nn.MultiHeadAttention(config)(torch.randn(2, 7, 32)).shape
        torch.Size([2, 7, 32])
    """

    base: float = 10000.0
    layout: Layout = "half"
    turned: int | None = None
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        check_rotary(self.base, self.layout, self.turned, self.scaling)

    def build(self, heads: int, head_width: int) -> Rotary:
        """The module for heads that are `head_width` wide; it serves any number of them."""
        return Rotary(head_width, self.base, layout=self.layout, turned=self.turned, scaling=self.scaling)


@dataclass(frozen=True)
class AlibiConfig:
    """Configuration of an `AlibiBias`, with the same fields, for `saccade.nn.AttentionConfig`.

    Example:
        >>> import saccade
        >>> saccade.positions.AlibiConfig(learned=True).build(heads=4, head_width=16).slopes.requires_grad
        True
    """

    learned: bool = False
    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_flag("learned", self.learned)

    def build(self, heads: int, head_width: int) -> AlibiBias:
        """The module for so many query heads, of any width."""
        return AlibiBias(heads, learned=self.learned, slopes=self.slopes)


@dataclass(frozen=True)
class T5Config:
    """Configuration of a `T5Bias`, with the same fields, for `saccade.nn.AttentionConfig`.

    Example:
        >>> import saccade
        >>> saccade.positions.T5Config(buckets=16).build(heads=4, head_width=16).table.shape
        torch.Size([16, 4])
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        check_buckets(self.buckets, self.max_distance, self.bidirectional)

    def build(self, heads: int, head_width: int) -> T5Bias:
        """The module for so many query heads, of any width."""
        return T5Bias(heads, buckets=self.buckets, max_distance=self.max_distance, bidirectional=self.bidirectional)


Config = RotaryConfig | AlibiConfig | T5Config
"""A position scheme as a value, for `AttentionConfig.positions`; `config.build(heads, head_width)` makes the module.

Example:
    >>> import saccade
    >>> saccade.positions.T5Config(bidirectional=False).build(heads=4, head_width=16)
    T5Bias(4, buckets=32, max_distance=128, bidirectional=False)
"""
