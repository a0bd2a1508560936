"""One run: a contender, a task, a seed; trained under the same budget as every other, and judged on held-out examples.

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
from ...support._seeding import seeded
from .contenders import TaskContender
from .examples import UNASKED, Examples, Task, digests, never_seen
from .model import ModelShape, SequenceModel, answers

SOLVED = 0.99  # share of the held-out answers
SURE = 0.999  # share of the validation's answers at two looks in a row, at which training has nothing left to gain

Tell = Callable[[int, float], object]  # steps done, share of the validation's answers that are right


@dataclass(frozen=True)
class TrainingBudget:
    """What every contender gets on every task.

    Args:
        steps: of Adam, at most; training ends where nothing is left to gain.
        batch: examples a step, all of them new.
        rates: learning rates. A contender that does not solve the task with one gets the next, from the start; the
            run that is right most often on the validation counts.
        warmup: steps in which the rate rises; then it falls to 0 along a cosine.
        every: steps between two looks at the validation.
        held: examples for the judgement; half as many for the validation.
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
        """Of that step, counted from 1: up in a line, down along half a cosine."""
        if step <= self.warmup:
            return highest * step / self.warmup
        done = (step - self.warmup) / max(self.steps + 1 - self.warmup, 1)
        return highest * 0.5 * (1.0 + float(torch.cos(torch.tensor(done * torch.pi, dtype=torch.float64))))


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run came to."""

    right: float  # share of the answers to held-out examples
    by_group: tuple[float, ...]  # likewise, of each of the task's groups
    rate: float  # the learning rate that counted
    steps: int  # of the run that counted
    parameters: int
    seconds: float  # of all rates together
    cpu_seconds: float


@dataclass(frozen=True)
class _Trained:
    model: SequenceModel
    validated: float
    steps: int
    rate: float


def run(
    contender: TaskContender, task: Task, seed: int, shape: ModelShape, budget: TrainingBudget, tell: Tell | None = None
) -> TrainingOutcome:
    """Train and judge. The same arguments give the same numbers on the same machine.

    PyTorch's global generator is used, and left as it was.
    """
    wall, own = time.perf_counter(), time.process_time()
    judged, validation = (
        task.draw(count, torch.Generator().manual_seed(_part_seed(seed, part)))
        for part, count in (("judged", budget.held), ("validation", budget.held // 2))
    )
    held = torch.cat((digests(judged.tokens), digests(validation.tokens)))
    best: _Trained | None = None
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
    task: Task,
    seed: int,
    rate: float,
    budget: TrainingBudget,
    validation: Examples,
    held: Tensor,
    tell: Tell | None,
) -> _Trained:
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
    return _Trained(model, validated, step, rate)


def _answers_right(model: SequenceModel, examples: Examples) -> Tensor:
    """(n,) of each answer, whether it is right."""
    asked = examples.targets != UNASKED
    return answers(model, examples.tokens, asked) == examples.targets[asked]


def _part_seed(seed: int, part: str) -> int:
    """Another one for each part of a run, and for each run."""
    return 4 * seed + ("weights", "training", "validation", "judged").index(part)
