"""A training run of a contender on a task with a seed, with the same budget for all, and its test on held-out examples.

Shape legend: B batch, L length, n tokens with an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...operator.nn.config import check_count, check_number, check_positive
from ...support._restored import seeded
from .contenders import TaskContender
from .examples import UNASKED, Examples, SyntheticTask, digests, never_seen
from .model import ModelShape, SequenceModel, answers

SOLVED = 0.99  # share of the held-out answers
SURE = 0.999  # accuracy on validation at two evaluations in a row that ends training

Tell = Callable[[int, float], object]  # steps done, share of the validation's answers that are right


@dataclass(frozen=True)
class TrainingBudget:
    """The budget of every run.

    Args:
        steps: maximum number of steps of Adam.
        batch: new examples in each step.
        rates: learning rates. If a contender does not solve the task with one, the next is tried from the start; the
            run with the best validation accuracy counts.
        warmup: steps of linear warm-up; then the rate falls to 0 along a cosine.
        every: steps between evaluations.
        held: number of test examples; half as many are used for validation.
    """

    steps: int = 600
    batch: int = 32
    rates: tuple[float, ...] = (1e-2, 3e-3)
    warmup: int = 50
    every: int = 50
    held: int = 2048

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "every"):
            check_positive(name, getattr(self, name))
        check_count("warmup", self.warmup)
        check_count("held", self.held, least=2)
        if not self.rates:
            raise ValueError("rates: expected at least one learning rate, got none")
        for rate in self.rates:
            check_number("rates", rate)
            if rate <= 0:
                raise ValueError(f"rates: must be positive, got {rate}")

    def rate_at(self, step: int, highest: float) -> float:
        """Learning rate of a step, counted from 1."""
        if step <= self.warmup:
            return highest * step / self.warmup
        done = (step - self.warmup) / max(self.steps + 1 - self.warmup, 1)
        return highest * 0.5 * (1.0 + float(torch.cos(torch.tensor(done * torch.pi, dtype=torch.float64))))


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of a run."""

    right: float  # share of the answers to held-out examples
    by_group: tuple[float, ...]  # likewise, of each of the task's groups
    rate: float  # the learning rate that counted
    steps: int  # of the run that counted
    parameters: int
    seconds: float  # of all rates together
    cpu_seconds: float


@dataclass(frozen=True)
class _TrainedModel:
    model: SequenceModel
    validated: float
    steps: int
    rate: float


def run(
    contender: TaskContender,
    task: SyntheticTask,
    seed: int,
    shape: ModelShape,
    budget: TrainingBudget,
    tell: Tell | None = None,
) -> TrainingOutcome:
    """Train and test. Equal arguments give equal numbers on the same machine.

    Restores PyTorch's global generator afterwards.
    """
    wall, own = time.perf_counter(), time.process_time()
    judged, validation = (
        task.draw(count, torch.Generator().manual_seed(_part_seed(seed, part)))
        for part, count in (("judged", budget.held), ("validation", budget.held // 2))
    )
    held = torch.cat((digests(judged.tokens), digests(validation.tokens)))
    best: _TrainedModel | None = None
    for rate in budget.rates:
        with seeded(_part_seed(seed, "weights")):
            model = SequenceModel(contender, task, shape)
            trained = _train(model, task, seed, rate, budget, validation, held, tell)
        best = trained if best is None or trained.validated > best.validated else best
        if best.validated >= SOLVED:
            break
    assert best is not None
    right, groups = _answers_right(best.model, judged), judged.groups[(judged.targets != UNASKED).nonzero()[:, 0]]
    return TrainingOutcome(
        float(right.double().mean()),
        tuple(float(right[groups == group].double().mean()) for group in range(len(task.groups))),
        best.rate,
        best.steps,
        best.model.parameter_count(),
        time.perf_counter() - wall,
        time.process_time() - own,
    )


def _train(
    model: SequenceModel,
    task: SyntheticTask,
    seed: int,
    rate: float,
    budget: TrainingBudget,
    validation: Examples,
    held: Tensor,
    tell: Tell | None,
) -> _TrainedModel:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    random = torch.Generator().manual_seed(_part_seed(seed, "training"))
    looks, validated, step = 0, 0.0, 0
    for step in range(1, budget.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = budget.rate_at(step, rate)
        examples = never_seen(task.draw(budget.batch, random), held)
        asked = examples.targets != UNASKED
        loss = F.cross_entropy(model(examples.tokens, asked), examples.targets[asked], reduction="sum")
        optimizer.zero_grad()
        (loss / max(int(asked.sum()), 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % budget.every == 0 or step == budget.steps:
            validated = float(_answers_right(model, validation).double().mean())
            if tell is not None:
                tell(step, validated)
            looks = looks + 1 if validated >= SURE else 0
            if looks == 2:
                break
    return _TrainedModel(model, validated, step, rate)


def _answers_right(model: SequenceModel, examples: Examples) -> Tensor:
    """Whether each answer is right, (n,)."""
    asked = examples.targets != UNASKED
    return answers(model, examples.tokens, asked) == examples.targets[asked]


def _part_seed(seed: int, part: str) -> int:
    """A different seed for each part of a run, and for each run."""
    return 4 * seed + ("weights", "training", "validation", "judged").index(part)
