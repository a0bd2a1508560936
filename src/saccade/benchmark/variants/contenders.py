"""The interface of a compared mechanism or layer, with settings for each length.

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
class DecodingRun:
    """A decoding step: the last token after L - 1 cached ones. Its result is the last row of the forward pass."""

    step: Forward
    kept: int  # bytes of its cache or state


@dataclass(frozen=True)
class ContenderRunner:
    """A contender at one length, with its inputs.

    leaves: tensors with gradients in training: inputs first, then parameters. decoding: makes a decoding step, or a
    sentence with the reason why it cannot. aligned: exact attention's output (B, Hq, L, Dv) in this output's layout, if
    that differs.
    """

    forward: Forward
    leaves: tuple[Tensor, ...]
    inputs: int  # number of leaves that are inputs
    decoding: Callable[[], DecodingRun] | str
    parameters: int = 0
    aligned: Callable[[Tensor], Tensor] = field(default=lambda exact: exact)

    @property
    def bytes_of_inputs(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves[: self.inputs])

    def training(self) -> Callable[[], object]:
        """Returns a function of the forward and backward pass, with a fixed gradient of the output."""
        with torch.no_grad():
            upstream = torch.randn(self.forward().shape, generator=torch.Generator().manual_seed(1))
        # Some parameters are not used at every length.
        return lambda: torch.autograd.grad(self.forward(), self.leaves, upstream, allow_unused=True)


@dataclass(frozen=True)
class VariantContender(ABC):
    """A compared mechanism or layer. name: on the command line and in tables; `contender_named` finds it."""

    name: str

    @property
    @abstractmethod
    def kind(self) -> str:
        """`results.READING` or `results.LAYER`."""

    @property
    @abstractmethod
    def computes(self) -> str:
        """The kind of result: softmax, approximation or other, as in `Traits.computes`."""

    @property
    def whole(self) -> bool:
        """Whether the contender is exact attention, the baseline of its kind."""
        return False

    @abstractmethod
    def setting(self, length: int) -> str:
        """The contender's settings for this length, as text; "" without settings."""

    def refusal(self, sizes: ProblemSizes) -> str:
        """Why the contender cannot be compared at these sizes, at any length; "" if it can."""
        return ""

    def needs(self, sizes: ProblemSizes) -> int:
        """A lower bound of the bytes that training allocates; the actual peak is measured."""
        return 0

    @abstractmethod
    def build(self, sizes: ProblemSizes, tensors: tuple[Tensor, Tensor, Tensor], seed: int) -> ContenderRunner:
        """Build the contender for this length, with q, k, v (for a layer, with tokens of the same number and width)."""


def counted(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
