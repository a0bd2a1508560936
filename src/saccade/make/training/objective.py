"""The interface between the loop and a task: model, batches, loss and evaluation."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...operator.nn.stacks import LayerObserver, Stack

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation on the validation data.

    Args:
        loss: mean over the validation data.
        metrics: of the task, by name; the first one is shown.
        cost: used to select the best weights, the lower the better; None uses the loss.

    Example:
        >>> import saccade
        >>> look = saccade.training.Evaluation(loss=0.7, metrics={"accuracy": 0.9}, cost=-0.9)
        >>> look.judged
        -0.9
    """

    loss: float
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    cost: float | None = None

    @property
    def judged(self) -> float:
        return self.loss if self.cost is None else self.cost


class Objective(ABC):
    """The model, batches, loss and evaluation of a task. Abstract; `LanguageObjective` implements it for text.

    A batch may have any type: the loop only passes it on. `batch` must depend only on the step and on the constructor's
    arguments, so that a killed run continues bit for bit.

    Attributes:
        model: the trained module.

    Example:
        >>> import torch, saccade
        >>> from saccade.training import Evaluation, Execution, Monitor, Objective, Settings, train
        >>> class Line(Objective):  # learns y = 2 x
        ...     def __init__(self):
        ...         self.model = torch.nn.Linear(1, 1)
        ...     def batch(self, step):
        ...         return torch.linspace(-1, 1, 8)[:, None]
        ...     def split(self, batch, parts):
        ...         return list(batch.chunk(parts))
        ...     def weight(self, part):
        ...         return len(part)
        ...     def tokens(self, batch):
        ...         return len(batch)
        ...     def loss(self, model, part, observe=None):
        ...         return (model(part) - 2 * part).square().mean()
        ...     def evaluate(self, model, accelerator=None):
        ...         return Evaluation(self.loss(model, self.batch(0)).item())
        >>> settings = Settings(steps=100, rate=0.1, decay=0.0, warmup=0, execution=Execution(precision="no"))
        >>> train(Line(), settings, Monitor()) < 0.05
        True
    """

    model: nn.Module

    @abstractmethod
    def batch(self, step: int) -> Any:
        """The items of a step, for all processes."""

    @abstractmethod
    def split(self, batch: Any, parts: int) -> list[Any]:
        """The batch in at most `parts` parts (tensors, or dictionaries of them), each item in exactly one."""

    @abstractmethod
    def weight(self, part: Any) -> float:
        """The weight of a part's mean loss in the loss of the batch, such as its number of rows."""

    @abstractmethod
    def tokens(self, batch: Any) -> int:
        """Number of tokens in a batch, for the displayed speed."""

    @abstractmethod
    def loss(self, model: nn.Module, part: Any, observe: LayerObserver | None = None) -> Tensor:
        """The mean loss of a part, in float32 or wider.

        Args:
            model: `self.model` on its device.
            part: one of `split`.
            observe: passed to the model's call.
        """

    @abstractmethod
    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        """Evaluate on the validation data with dropout off. With an accelerator, all its processes call this."""

    def share_sequences(self, processes: int) -> None:
        """Have so many consecutive processes share each sequence. `loss` is then this one's share of the mean loss."""
        if processes > 1:
            raise ValueError(f"context_parallel: {type(self).__name__} cannot share sequences, language models can")

    def recompute_blocks(self, on: bool) -> None:
        """Turn activation checkpointing on or off: the backward pass then keeps only the input of each block."""
        stacks = [part for part in self.model.modules() if isinstance(part, Stack)]
        if on and not stacks:
            raise ValueError(f"checkpointing: {type(self.model).__name__} has no blocks to recompute")
        for stack in stacks:
            stack.checkpointing = on
