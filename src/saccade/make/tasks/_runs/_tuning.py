"""Which weights of a checkpoint are trained: all, the last blocks, or low-rank updates (LoRA).

Shape legend: F features out, E features in, R rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ....operator.nn.stacks import Stack
from ...models import Model

SCALE = 2.0  # alpha / R of the paper
_ORIGINAL, _CHANGE = ".parametrizations.weight.original", ".parametrizations.weight.0."
PROJECTION = "projection_to_teacher"  # of a student to its teacher's width, while it learns
_READERS = ("head", "pooler")  # of the hidden states: they always learn


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The weights of a checkpoint that are trained. The head always is.

    Args:
        last: so many of the last blocks of each stack; None: all blocks, and the embeddings.
        lora: of these blocks not the weights themselves, but a change of this rank of each matrix (Hu et al., "LoRA:
            Low-Rank Adaptation of Large Language Models", 2021): W + 2 U D, with U (F, R) zero at first and D (R, E)
            drawn at random. Embeddings stay as they are.
    """

    last: int | None = None
    lora: int | None = None

    def __post_init__(self) -> None:
        for name in ("last", "lora"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")

    def __bool__(self) -> bool:
        return self.last is not None or self.lora is not None

    def __str__(self) -> str:
        if not self:
            return "all weights"
        last = "the last block" if self.last == 1 else f"the last {self.last} blocks"
        blocks = "all blocks" if self.last is None else last
        return f"the head and {'' if self.lora is None else f'changes of rank {self.lora} in '}{blocks}"

    def apply(self, model: Model) -> None:
        """Freeze all other weights of the model. ValueError if it has no blocks, or fewer than `last`."""
        if not self:
            return
        blocks = self._blocks(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        learning = [getattr(model, name, None) for name in _READERS]
        if self.lora is None:
            learning += blocks
        else:
            learning += [low_rank(linear, self.lora) for block in blocks for linear in _linears(block)]
        for module in learning:
            if module is not None:
                module.requires_grad_(True)

    def _blocks(self, model: Model) -> list[nn.Module]:
        stacks = [part for part in model.modules() if isinstance(part, Stack)]
        name = "last" if self.lora is None else "lora"
        if not stacks:
            raise ValueError(f"{name}: {model.family.name} has no blocks that can be trained separately")
        fewest = min(len(stack.blocks) for stack in stacks)
        if self.last is not None and self.last > fewest:
            raise ValueError(f"last: the model has {fewest} blocks, got {self.last}")
        return [block for stack in stacks for block in list(stack.blocks)[-(self.last or len(stack.blocks)) :]]


ALL = Tuning()


class LowRank(nn.Module):
    """A weight W (F, E) becomes W + 2 up down."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        features_out, features_in = weight.shape
        self.up = nn.Parameter(weight.new_zeros(features_out, rank))
        self.down = nn.Parameter(torch.randn(rank, features_in).to(weight) * features_in**-0.5)

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # or the sum would differ from the one that is stored
            return changed(weight, self.up, self.down)


def changed(weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return torch.addmm(weight, up, down, alpha=SCALE)


def low_rank(linear: nn.Linear, rank: int) -> LowRank:
    """Add a trained product of this rank to a layer's weight, and return it."""
    change = LowRank(linear.weight, rank)
    parametrize.register_parametrization(linear, "weight", change, unsafe=True)
    return change


def merged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names of the plain model, with low-rank updates added."""
    plain = {}
    for name, tensor in weights.items():
        if name.endswith(_ORIGINAL):
            layer = name.removesuffix(_ORIGINAL)
            up, down = (weights[f"{layer}{_CHANGE}{part}"] for part in ("up", "down"))
            plain[f"{layer}.weight"] = changed(tensor, up, down)
        elif _CHANGE not in name:
            plain[name] = tensor
    return {name: tensor for name, tensor in plain.items() if not name.startswith(PROJECTION)}


def parameter_count(model: nn.Module) -> int:
    """The number of parameters of the plain model."""
    known = ((name, one) for name, one in model.named_parameters() if not name.startswith(PROJECTION))
    return sum(parameter.numel() for name, parameter in known if _CHANGE not in name)


def _linears(block: nn.Module) -> Iterator[nn.Linear]:
    return (part for part in block.modules() if isinstance(part, nn.Linear))
