"""What the loop trains: a model, its batches, its loss, and how it is judged. One for each task."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..nn.stacks import LayerObserver, Stack

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A look at the validation data.

    Args:
        loss: over all of it.
        metrics: of the task, by name, the first of them the one to show.
        cost: what the run is judged by, the lower the better; None is the loss.
    """

    loss: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cost: float | None = None

    @property
    def judged(self) -> float:
        return self.loss if self.cost is None else self.cost


class Objective(ABC):
    """What a loop trains. Abstract; `LanguageObjective` is the one of text.

    A batch is whatever the objective makes of it; the loop hands it on. `batch` is a function of the step and of what
    the objective was made with, and of nothing else: so a run goes on after a kill bit for bit.

    Attributes:
        model: what is trained.
    """

    model: nn.Module

    @abstractmethod
    def batch(self, step: int) -> Any:
        """The items of a step, of all processes together."""

    @abstractmethod
    def split(self, batch: Any, parts: int) -> list[Any]:
        """The batch in so many parts (tensors, or dictionaries of them), each item in one of them."""

    @abstractmethod
    def weight(self, part: Any) -> float:
        """What the loss of a part is a mean over, such as its rows: parts count by it."""

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """How much there is to learn in a batch, for the speed that is shown."""

    @abstractmethod
    def loss(self, model: nn.Module, part: Any, observe: LayerObserver | None = None) -> Tensor:
        """The mean loss of a part, in float32 or wider.

        Args:
            model: `self.model` as it stands on its device.
            observe: handed to the model's call.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        """A look at the validation data with dropout off; with an accelerator all its processes call this."""

    def recompute_blocks(self, on: bool) -> None:
        """Whether the backward pass has only what each block reads, and computes the rest again."""
        stacks = [part for part in self.model.modules() if isinstance(part, Stack)]
        if on and not stacks:
            raise ValueError(f"checkpointing: {type(self.model).__name__} has no blocks that could be computed again")
        for stack in stacks:
            stack.checkpointing = on
