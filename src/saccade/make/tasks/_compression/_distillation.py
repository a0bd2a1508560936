"""Distillation: a student learns the teacher's softened outputs in addition to the labels, and optionally its hidden
states and attention relations.

Shape legend: N rows, K classes, B batch, L length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ....operator._observers import aside, padding_in_place
from ....operator.nn import Observation
from ....operator.nn.stacks import LayerObserver
from ....support._restored import evaluating
from ...models import Model, ModelOutput
from ...training import Evaluation, Objective
from ...training.run_folder.resume import digest
from .._example_task import Batch, ExampleObjective, ExampleTask
from .._runs._run_folder import weights_digest
from .._runs._tuning import PROJECTION, parameter_count
from ._soft_losses import relation_distance, softened_divergence, state_distance
from ._student import Student

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclasses.dataclass(frozen=True)
class Teaching:
    """The weights of the losses in distillation.

    Args:
        weight: of the teacher's outputs; what is left of 1 is that of the task's own loss.
        temperature: by which logits of both are divided.
        hidden: weight of the distance of last hidden states, which is added; see `state_distance`.
        relations: the same of the last layers' attention and values; see `relation_distance`.
    """

    weight: float = 0.5
    temperature: float = 2.0
    hidden: float = 0.0
    relations: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"weight: of the teacher's outputs, must be from 0 to 1, got {self.weight}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature: must be finite and above 0, got {self.temperature}")
        for name in ("hidden", "relations"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be finite and at least 0, got {value}")

    def __str__(self) -> str:
        parts = [f"weight {self.weight:g}, temperature {self.temperature:g}"]
        parts += [f"{name} {getattr(self, name):g}" for name in ("hidden", "relations") if getattr(self, name)]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Distillation:
    """A teacher, its student, and the losses.

    Args:
        folder: of the teacher's run.
        task: that the teacher was trained for.
        unlabelled: a file of inputs that the teacher has labelled; None: there is none.
    """

    folder: Path
    task: ExampleTask
    teacher: Model = dataclasses.field(repr=False)
    student: Student
    teaching: Teaching
    unlabelled: Path | None = None

    @property
    def origin(self) -> str:
        """The initial weights of a new student, as text."""
        blocks = self.student.blocks(self.teacher)
        return f"blocks {', '.join(map(str, blocks))} of {self.folder}" if blocks else "random weights"

    @property
    def told(self) -> str:
        """The teacher and the losses, as text."""
        size = parameter_count(self.teacher)
        return f"{self.folder}, {self.teacher.family.name} of {size:,} parameters: {self.teaching}"

    def described(self) -> dict[str, Any]:
        """Everything that decides what the student learns, for the run's description."""
        known = {"student": str(self.student), "teacher": weights_digest(self.folder), **vars(self.teaching)}
        extra = {} if self.unlabelled is None else {"unlabelled data": digest(self.task.files(self.unlabelled))}
        return {**known, **extra}

    def new_student(self) -> Model:
        return self.student.new_model(self.teacher, self.task.label_names)

    def objective(self, plain: Objective, examples: Sequence[Any]) -> Objective:
        """The objective to train instead of `plain`. ValueError if the two models do not fit together."""
        assert isinstance(plain, ExampleObjective)
        return DistilledObjective(self, plain, examples)


class Computed(NamedTuple):
    """The result of a model for a batch: for `loss`, the last hidden state (B, L, E), the last self-attention."""

    result: Any
    state: Tensor | None
    attention: Observation | None


class DistilledObjective(Objective):
    """The batches and evaluations of the task, and a loss with the distances between student and teacher."""

    model: Model

    def __init__(self, distillation: Distillation, plain: ExampleObjective, examples: Sequence[Any]):
        self.model, self._plain = plain.model, plain
        self._task, self._teacher, self._teaching = distillation.task, distillation.teacher, distillation.teaching
        self._teacher.requires_grad_(False)
        if not self._task.reads_alike(plain.model, self._teacher, examples):
            raise ValueError(
                f"student: it does not read the tokens, pixels or samples that {distillation.folder} reads; expected "
                "a student with its tokenizer or processor"
            )
        self._check()

    # --- batches and looks: the task's own ------------------------------------------------------------------------

    def batch(self, step: int) -> Batch:
        return self._plain.batch(step)

    def split(self, batch: Batch, parts: int) -> list[Batch]:
        """Parts with the ratio of examples to hidden states: distances are means over states, the loss of examples."""
        ratio = self.weight(batch) / self._states(batch)
        return [{**part, _RATIO: torch.tensor(ratio)} for part in self._plain.split(batch, parts)]

    def weight(self, part: Batch) -> float:
        return self._plain.weight(part)

    def tokens(self, batch: Batch) -> int:
        return self._plain.tokens(batch)

    def evaluate(self, model: nn.Module, accelerator: Accelerator | None = None) -> Evaluation:
        return self._plain.evaluate(model, accelerator)

    # --- loss -----------------------------------------------------------------------------------------------------

    def loss(self, model: nn.Module, part: Batch, observe: LayerObserver | None = None) -> Tensor:
        teaching, ratio = self._teaching, part.get(_RATIO)
        batch = {name: tensor for name, tensor in part.items() if name != _RATIO}
        student = self._computed(model, self.model, batch, observe)
        with torch.no_grad(), evaluating(self._teacher), aside():
            self._teacher.to(self.model.device)
            teacher = self._computed(self._teacher, self._teacher, batch)
        total = (1 - teaching.weight) * self._task.loss(student.result, batch, learning=True)
        total = total + teaching.weight * self._soft(student.result, teacher.result, batch)
        if not (teaching.hidden or teaching.relations):
            return total
        weight = self.weight(batch)
        scale = 1.0 if ratio is None or not weight else float(ratio) * self._states(batch) / weight
        return total + scale * self._inside(student, teacher, batch)

    def _computed(self, model: nn.Module, inner: Model, batch: Batch, observe: LayerObserver | None = None) -> Computed:
        """Run a model; `inner` is the model without the wrapper of distributed training."""
        outputs: list[ModelOutput] = []
        calls: list[Observation] = []

        def keep(layer: int, call: Observation) -> None:
            if not call.cross:
                calls[:] = [call]
            if observe is not None:
                observe(layer, call)

        wanted = self._teaching
        with inner.register_forward_hook(lambda module, given, output: outputs.append(output)), self._padding():
            result = self._task.forward(model, batch, keep if wanted.relations else observe)
        if len(outputs) > 1 and (wanted.hidden or wanted.relations):
            raise ValueError(
                f"hidden, relations: a {inner.family.name} of this kind reads each item of a batch separately; "
                "expected 0"
            )
        state = outputs[-1].last_hidden_state if outputs else None
        return Computed(result, state, calls[0] if calls else None)

    def _states(self, batch: Batch) -> int:
        """The number of hidden states of the input, or of items where all have equally many."""
        counts = self._task.state_counts(batch)
        return self._task.counted(batch) if counts is None else int(counts.sum())

    def _padding(self) -> contextlib.AbstractContextManager[None]:
        # Relations are of items and positions, which a row of all items' tokens has not.
        return padding_in_place() if self._teaching.relations else contextlib.nullcontext()

    def _soft(self, student: Any, teacher: Any, batch: Batch) -> Tensor:
        """The mean over rows, weighted as the task's own loss."""
        weights = self._task.row_weights(batch)
        means = []
        for ours, theirs in zip(self._task.logits(student, batch), self._task.logits(teacher, batch), strict=True):
            if ours.shape != theirs.shape:
                raise ValueError(
                    f"student: it has {ours.shape[-1]} outputs, its teacher {theirs.shape[-1]}; both must have the "
                    "same classes, pieces or positions"
                )
            rows = softened_divergence(ours, theirs, self._teaching.temperature)
            whole = max(len(rows), 1) if weights is None else weights.sum()
            means.append((rows if weights is None else rows * weights).sum() / whole)
        return torch.stack(means).mean()

    def _inside(self, student: Computed, teacher: Computed, batch: Batch) -> Tensor:
        """The distances of states and of relations, by their weights."""
        teaching, total = self._teaching, torch.zeros((), device=self.model.device)
        if teaching.hidden:
            assert student.state is not None and teacher.state is not None
            counts, places = (
                self._task.state_counts(batch),
                torch.arange(student.state.shape[1], device=self.model.device),
            )
            real = None if counts is None else places < counts[:, None]
            projection = getattr(self.model, PROJECTION, None)
            projected = None if projection is None else projection(student.state)
            total = total + teaching.hidden * state_distance(student.state, teacher.state, real, projected)
        if teaching.relations:
            assert student.attention is not None and teacher.attention is not None
            total = total + teaching.relations * relation_distance(student.attention, teacher.attention)
        return total

    # --- what fits together ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def _check(self) -> None:
        """Compute a loss once, so that models that do not fit are found before anything is trained.

        Raises:
            ValueError: what does not fit.
        """
        batch = self.batch(0)
        item = self.split(batch, max(len(next(iter(batch.values()))) // 2, 1))[0]  # two rows, or some more
        batch = {name: tensor for name, tensor in item.items() if name != _RATIO}
        with evaluating(self.model), evaluating(self._teacher):
            computed = [self._computed(model, model, batch) for model in (self.model, self._teacher)]
            self._check_states(*computed)
            self._check_attention(*computed)
            if self._teaching.hidden and (
                widths := [each.state.shape[-1] for each in computed if each.state is not None]
            ):
                self._project(*widths)
            self.loss(self.model, item)

    def _project(self, width: int, of_teacher: int) -> None:
        """Add a projection to the teacher's width to the student. It is trained, and not stored."""
        if width != of_teacher and not hasattr(self.model, PROJECTION):
            self.model.add_module(PROJECTION, nn.Linear(width, of_teacher, bias=False))

    def _check_states(self, student: Computed, teacher: Computed) -> None:
        if not self._teaching.hidden:
            return
        for who, model, found in (("student", self.model, student), ("teacher", self._teacher, teacher)):
            if found.state is None or found.state.ndim != 3:
                raise ValueError(f"hidden: the {who}, a {model.family.name}, gives no hidden states of tokens")
        assert student.state is not None and teacher.state is not None
        if student.state.shape[:2] != teacher.state.shape[:2]:
            raise ValueError(
                f"hidden: the student has {student.state.shape[1]} states of an input, its teacher "
                f"{teacher.state.shape[1]}; expected as many"
            )

    def _check_attention(self, student: Computed, teacher: Computed) -> None:
        if not self._teaching.relations:
            return
        for who, model, found in (("student", self.model, student), ("teacher", self._teacher, teacher)):
            if found.attention is None:
                raise ValueError(f"relations: attention of the {who}, a {model.family.name}, cannot be observed")
            if found.attention.mechanism is not None:
                raise ValueError(f"relations: the {who} has no softmax attention, whose weights could be compared")
        lengths = [one.attention.query.shape[2] for one in (student, teacher) if one.attention is not None]
        if lengths[0] != lengths[1]:
            raise ValueError(f"relations: the student has {lengths[0]} tokens of an input, its teacher {lengths[1]}")


_RATIO = "weight of a state"  # in a part of a batch
