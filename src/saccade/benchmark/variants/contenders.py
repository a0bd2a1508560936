"""What stands in the table: something that reads q, k and v, or a layer over tokens, at one setting for each length.

Shape legend: B batch, Hq / Hkv query and key-value heads, L tokens, D key width, Dv value width, E = Hq D.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .data import ProblemSizes

Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class Decoding:
    """One more token after L - 1 others. Its result is the last row of the forward's."""

    step: Forward
    kept: int  # bytes that it keeps of the past


@dataclass(frozen=True)
class ContenderRunner:
    """A contender at one length, with its inputs.

    leaves: what training has gradients of: inputs first, then parameters.
    decoding: how it decodes, or a sentence that says why it cannot.
    aligned: exact attention's output (B, Hq, L, Dv) in the layout of this output, for what has another.
    """

    forward: Forward
    leaves: tuple[Tensor, ...]
    inputs: int  # how many of the leaves are inputs
    decoding: Callable[[], Decoding] | str
    parameters: int = 0
    aligned: Callable[[Tensor], Tensor] = field(default=lambda exact: exact)

    @property
    def bytes_of_inputs(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves[: self.inputs])

    def training(self) -> Callable[[], object]:
        """Forward and backward, from a fixed gradient of the output."""
        with torch.no_grad():
            upstream = torch.randn(self.forward().shape, generator=torch.Generator().manual_seed(1))
        # A parameter may play no part at this length.
        return lambda: torch.autograd.grad(self.forward(), self.leaves, upstream, allow_unused=True)


@dataclass(frozen=True)
class VariantContender(ABC):
    """What is compared. name: as the command line and the tables call it; `contenders.named` finds it again."""

    name: str

    @property
    @abstractmethod
    def kind(self) -> str:
        """`results.READING` or `results.LAYER`."""

    @property
    @abstractmethod
    def computes(self) -> str:
        """As `Traits.computes`."""

    @property
    def whole(self) -> bool:
        """Whether it is exact attention, which the others of its kind are measured against."""
        return False

    @abstractmethod
    def setting(self, length: int) -> str:
        """How it is set for this length, in a few words; empty where there is nothing to set."""

    def refusal(self, sizes: ProblemSizes) -> str:
        """Why it takes no part in a comparison of these sizes, whatever the length; empty where it does."""
        return ""

    def needs(self, sizes: ProblemSizes) -> int:
        """Bytes that training forms for certain; what it forms besides is measured."""
        return 0

    @abstractmethod
    def build(self, sizes: ProblemSizes, tensors: tuple[Tensor, Tensor, Tensor], seed: int) -> ContenderRunner:
        """At this length, with q, k, v (or, for a layer, with tokens of the same number and width)."""


def counted(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
