"""Tasks of independent examples: batches of similar lengths, and a loss that is a mean over examples.

All tasks but those on one graph are of this kind. Shape legend: B examples of a batch.
"""

from __future__ import annotations

import dataclasses
import traceback
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ...operator.batching import LengthGrouped
from ...operator.nn.stacks import LayerObserver
from ...see.monitoring import Observations, watch
from ...support._restored import evaluating
from ..models import Model
from ..training import Evaluation, Objective, Settings
from ..training.memory import INPUT_SMALLER, is_out_of_memory, memory_told
from ._task import Task

if TYPE_CHECKING:
    from accelerate import Accelerator

Batch = dict[str, Tensor]
"""Tensors (B, ...) by name."""
JUDGED = 32  # rows of a batch in evaluation, at most


@dataclasses.dataclass(frozen=True)
class ExampleTask(Task):
    """A task whose data is a list of examples. Abstract.

    Example:
        >>> import saccade
        >>> issubclass(saccade.tasks.Forecast, saccade.tasks.ExampleTask)
        True
    """

    def split(self, data: Sequence[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
        count = min(max(round(share * len(data)), 1), len(data) - 1)
        chosen = set(np.random.default_rng((seed, 0)).permutation(len(data))[:count].tolist())
        return parted(data, chosen)

    @abstractmethod
    def encode(self, model: Model, examples: Sequence[Any]) -> list[Any]:
        """An item for each example, from which `collate` makes batches. Called once, not in every epoch."""

    def length(self, item: Any) -> int:
        """How much of a row an item fills; items of similar length share a batch."""
        return 1

    def rows(self, item: Any) -> int:
        """The number of rows that an item fills in a batch: several if a long example is read in parts."""
        return 1

    @abstractmethod
    def collate(self, model: Model, items: Sequence[Any], random: np.random.Generator | None = None) -> Batch:
        """The tensors of a batch, without labels if an example has none.

        Args:
            random: generator of a training step, for augmentation and masks; None in evaluation.
        """

    def counted(self, batch: Batch) -> int:
        """The number of `unit`s in a batch: tokens of texts, else rows."""
        return int(batch["attention_mask"].sum()) if "attention_mask" in batch else len(next(iter(batch.values())))

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch, observe: LayerObserver | None = None) -> Any:
        """The model's result for a batch, which `loss` and `outputs` take."""

    @abstractmethod
    def loss(self, result: Any, batch: Batch, *, learning: bool) -> Tensor:
        """The mean loss of a batch; with label smoothing and class weights only if `learning`."""

    def weight(self, batch: Batch, *, learning: bool) -> float:
        """The denominator of the mean loss: the number of examples or labelled tokens, or the sum of their weights."""
        return len(next(iter(batch.values())))

    @abstractmethod
    def outputs(self, model: nn.Module, result: Any, batch: Batch) -> list[Any]:
        """The output for each example, as plain values."""

    # --- distillation ---------------------------------------------------------------------------------------------

    @property
    def label_names(self) -> Sequence[str]:
        """The names of the head's classes; empty if it is not a classifier."""
        return ()

    def logits(self, result: Any, batch: Batch) -> list[Tensor]:
        """The logits (N, K) in `forward`'s result by which a student is compared with its teacher, over the rows of the
        loss; empty for a task that has no classes."""
        return []

    @property
    def teachable(self) -> bool:
        """Whether a student can learn from `logits`."""
        return type(self).logits is not ExampleTask.logits

    def row_weights(self, batch: Batch) -> Tensor | None:
        """The weight (N,) of each of these rows in training; None if all weights are equal."""
        return None

    def state_counts(self, batch: Batch) -> Tensor | None:
        """The number of hidden states (B,) of each row that are not padding; the padding follows them. None if no state
        is padding."""
        return batch["attention_mask"].sum(1) if "attention_mask" in batch else None

    def reads_alike(self, student: Model, teacher: Model, examples: Sequence[Any]) -> bool:
        """Whether both models get the same batches of these examples."""
        return self.encode(student, examples) == self.encode(teacher, examples)

    def objective(
        self, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ) -> Objective:
        return ExampleObjective(self, model, training, validation, settings)

    def observed(self, model: Model, data: Sequence[Any]) -> tuple[Observations, list[str]]:
        batch = self.collate(model, self.encode(model, data)[:1])
        words = self.token_names(model, batch)
        with evaluating(model), torch.no_grad(), watch(model, keep=True) as watched:
            self.forward(model, {name: tensor.to(model.device) for name, tensor in batch.items()})
        return watched, words

    def token_names(self, model: Model, batch: Batch) -> list[str]:
        """A label for each token of a batch of one example, if the tokens are not text."""
        raise ValueError(f"{self.name}: reads text; see saccade.look and saccade.view")

    def predict(self, model: Model, data: Sequence[Any], rows: int = JUDGED) -> list[Any]:
        """The outputs for all examples. Out of memory, it halves the rows of a batch; TooLittleMemory at one row."""
        outputs: dict[int, Any] = {}
        items = self.encode(model, data)
        while True:
            left = [n for n in range(len(items)) if n not in outputs]
            try:
                with evaluating(model), torch.no_grad():
                    for numbers, batch in judged_batches(self, model, items, rows, left):
                        result = forward_in_parts(self, model, batch, rows)
                        outputs |= dict(zip(numbers, self.outputs(model, result, batch), strict=True))
                return [outputs[n] for n in range(len(items))]
            except (RuntimeError, MemoryError) as error:
                if rows == 1 or not is_out_of_memory(error):
                    with memory_told(f"{self.name}: one input alone", lambda: INPUT_SMALLER):
                        raise
                traceback.clear_frames(error.__traceback__)  # they hold what was computed until then
                rows //= 2


class ExampleObjective(Objective):
    """Batches of examples of similar lengths, each example once in an epoch.

    All batches are full: an epoch leaves out the few examples that do not fill a batch, different ones in each.
    """

    model: Model

    def __init__(
        self, task: ExampleTask, model: Model, training: Sequence[Any], validation: Sequence[Any], settings: Settings
    ):
        self.model, self._task, self._validation, self._seed = model, task, validation, settings.seed
        self._batch, self._parts = settings.batch, settings.execution.accumulate
        self._items = task.encode(model, training)
        self._judged = task.encode(model, validation)
        lengths = [max(task.length(item), 1) for item in self._items]
        batch = min(settings.batch, len(lengths))
        self._sampler = LengthGrouped(lengths, batch, seed=settings.seed, drop_last=True, report=None)
        self._epoch = (0, self._sampler.batches(0))

    def batch(self, step: int) -> Batch:
        epoch, number = divmod(step, len(self._epoch[1]))  # every epoch has as many
        if epoch != self._epoch[0]:
            self._epoch = (epoch, self._sampler.batches(epoch))
        chosen = self._epoch[1][number]
        random = np.random.default_rng((self._seed, step))
        return self._task.collate(self.model, [self._items[n] for n in chosen], random)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Parts of whole examples. `texts` has the example of each row, where examples may have several."""
        rows = len(next(iter(batch.values())))
        texts = batch.get("texts", torch.arange(rows))
        split_parts = []
        for numbers in torch.arange(int(texts[-1]) + 1).tensor_split(parts):
            chosen = torch.isin(texts, numbers)
            part = {name: tensor[chosen] for name, tensor in batch.items()}
            split_parts.append({**part, "texts": part["texts"] - numbers[:1]} if "texts" in part else part)
        return split_parts

    def weight(self, part: Batch) -> float:
        return self._task.weight(part, learning=True)

    def tokens(self, batch: Batch) -> int:
        return self._task.counted(batch)

    def loss(self, model: nn.Module, part: Batch, observe: LayerObserver | None = None) -> Tensor:
        return self._task.loss(self._task.forward(model, part, observe), part, learning=True)

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        """Metrics of all validation examples. Every process computes the same values."""
        task, outputs = self._task, dict[int, Any]()

        def keep(numbers: Sequence[int], result: Any, batch: Batch) -> None:
            outputs.update(zip(numbers, task.outputs(model, result, batch), strict=True))

        loss = self.mean_loss(model, self.judged_rows(accelerator), keep)
        scores = task.scores([outputs[n] for n in range(len(self._judged))], self._validation)
        return Evaluation(loss, scores, task.cost(scores))

    def judged_rows(self, accelerator: Accelerator | None) -> int:
        """The rows of a batch in evaluation: at most as many as in a micro-batch, which is known to fit into memory."""
        processes = 1 if accelerator is None else accelerator.num_processes
        return max(1, min(JUDGED, self._batch // (self._parts * processes)))

    def mean_loss(
        self, model: nn.Module, rows: int, keep: Callable[[Sequence[int], Any, Batch], None] = lambda *computed: None
    ) -> float:
        """The mean validation loss, without dropout; `keep` gets the numbers, the result and the batch."""
        task, total, whole = self._task, 0.0, 0.0
        with evaluating(model), torch.no_grad():
            for numbers, batch in judged_batches(task, self.model, self._judged, rows):
                result = forward_in_parts(task, model, batch, rows)
                weight = task.weight(batch, learning=False)
                total, whole = total + float(task.loss(result, batch, learning=False)) * weight, whole + weight
                keep(numbers, result, batch)
        return total / whole


def judged_batches(
    task: ExampleTask, model: Model, items: Sequence[Any], rows: int = JUDGED, chosen: Sequence[int] | None = None
) -> Iterator[tuple[list[int], Batch]]:
    """Numbers of items (only `chosen` ones) and their batch on the model's device, the longest first; see `_judged`."""
    for numbers in _judged(task, items, rows, range(len(items)) if chosen is None else chosen):
        batch = task.collate(model, [items[n] for n in numbers])
        yield numbers, {name: tensor.to(model.device) for name, tensor in batch.items()}


def forward_in_parts(task: ExampleTask, model: nn.Module, batch: Batch, rows: int) -> Any:
    """`forward` of a batch in evaluation; an example with more rows than `rows` is computed in parts."""
    if len(next(iter(batch.values()))) <= rows:
        return task.forward(model, batch)
    parts = zip(*(tensor.split(rows) for tensor in batch.values()), strict=True)
    results = [task.forward(model, dict(zip(batch, part, strict=True))) for part in parts]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(torch.cat(tensors) for tensors in zip(*results, strict=True))


def widened(logits: Tensor) -> Tensor:
    """Logits in float32 or wider, for losses and probabilities."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def parted(data: Sequence[Any], chosen: Collection[int]) -> tuple[list[Any], list[Any]]:
    """The examples whose numbers are not in `chosen`, and those whose numbers are."""
    return [one for n, one in enumerate(data) if n not in chosen], [data[n] for n in sorted(chosen)]


def _judged(task: ExampleTask, items: Sequence[Any], most: int, chosen: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of items in batches of similar lengths, the longest first, so that too little memory shows at once."""
    lengths = {n: task.length(items[n]) for n in chosen}
    batch: list[int] = []
    filled = 0
    for number in sorted(chosen, key=lambda n: -lengths[n]):
        rows = task.rows(items[number])
        if batch and filled + rows > most:
            yield batch
            batch, filled = [], 0
        batch.append(number)
        filled += rows
    if batch:
        yield batch
