"""The training loop. Accelerate handles devices, processes and precision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...see.monitoring import AttentionMonitor
from ...support._shared_cores import shared_cores
from .anomaly import AnomalyReport, locate_anomaly
from .memory import LOOK_SMALLER, OPTIMIZER_SMALLER, is_out_of_memory, memory_told, smaller_parts
from .norms import gradient_norms, weight_norms
from .objective import Evaluation, Objective
from .processes import accelerator_for, any_of, is_sharded, own_parts, slowest
from .running_statistics import frozen_norms, share_statistics
from .settings import EvaluationSettings, Settings
from .state import capture, restore, step_seed, whole_weights
from .stopping import Stopped

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_SKIPPED = 20  # consecutive steps that fp16's loss scaling may skip


class Monitor:
    """Callbacks of the training loop. The default methods do nothing; override those you need.

    Example:
        >>> import torch, saccade
        >>> from saccade.training import Corpus, Execution, LanguageObjective, LanguageSettings, Monitor, train
        >>> class Steps(Monitor):
        ...     def step(self, step, loss, norm, rate, tokens_per_second):
        ...         print(step, rate)
        >>> model = saccade.models.DecoderLM(saccade.models.ModelConfig(5, width=8, layers=1, heads=2, context=4))
        >>> text = torch.arange(100) % 4 + 1
        >>> settings = LanguageSettings(steps=2, batch=2, rate=0.1, warmup=2, execution=Execution(precision="no"))
        >>> loss = train(LanguageObjective(model, Corpus(text, text), 0, settings), settings, Steps())
        1 0.05
        2 0.1
    """

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None: ...

    def norms(self, step: int, gradients: dict[str, float], weights: dict[str, float]) -> None: ...

    def evaluated(
        self, step: int, training_loss: float, evaluation: Evaluation, seconds: float, weights: dict[str, Tensor]
    ) -> None: ...

    def checkpoint(self, step: int, state: dict[str, Any]) -> None: ...

    def attention(self, model: nn.Module) -> AttentionMonitor | None:
        """The monitor of the model's attention, or None. Called once."""
        return None


class Diverged(ValueError):
    """The loss or a gradient is not a finite number.

    Attributes:
        report: the first tensor that is not finite (see `find_anomaly`).

    Example:
        >>> import torch, saccade
        >>> from saccade.training import Corpus, Execution, LanguageObjective, LanguageSettings, Monitor, train
        >>> model = saccade.models.DecoderLM(saccade.models.ModelConfig(5, width=8, layers=1, heads=2, context=4))
        >>> _ = torch.nn.init.constant_(model.embedding.weight, float("nan"))
        >>> text = torch.arange(100) % 4 + 1
        >>> settings = LanguageSettings(steps=1, batch=2, execution=Execution(precision="no"))
        >>> try:
        ...     train(LanguageObjective(model, Corpus(text, text), 0, settings), settings, Monitor())
        ... except saccade.training.Diverged as error:
        ...     print(error.report.place)
        output of embedding
    """

    def __init__(self, message: str, report: AnomalyReport):
        super().__init__(message)
        self.report = report


@dataclasses.dataclass
class Progress:
    """Progress of a run.

    Args:
        loss, count: sum of the training losses, and number of steps, since the last evaluation.
        mark, mark_loss: the cost to improve on, and the validation loss of that evaluation.
        waited: evaluations since then.
        longest: seconds of the longest step or evaluation.
    """

    step: int = 0
    loss: float = 0.0
    count: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation: float = math.nan
    mark: float = math.inf
    mark_loss: float = math.inf
    waited: int = 0
    longest: float = 0.0

    def moved_to(self, seconds: float) -> None:
        """Record the time after a step or an evaluation."""
        self.longest = max(self.longest, seconds - self.seconds)
        self.seconds = seconds

    def looked(self, cost: float, looks: EvaluationSettings, *, counts: bool, loss: float | None = None) -> float:
        """Record the cost of an evaluation and return the mean training loss since the last one.

        Args:
            loss: breaks ties: at the same cost, a lower loss is an improvement. None if the cost is the loss.
        """
        better = loss is not None and cost == self.mark and loss < self.mark_loss
        if cost < self.mark - looks.improvement or better or not counts:
            self.mark, self.waited = min(cost, self.mark) if counts else math.inf, 0
            self.mark_loss = math.inf if loss is None else loss
        else:
            self.waited += 1
        mean = self.loss / max(self.count, 1)
        self.loss, self.count = 0.0, 0
        return mean

    def look_due(self, settings: Settings) -> bool:
        """Whether an evaluation follows the current step. With a time budget the first one comes early, to measure its
        time."""
        unknown = settings.minutes is not None and math.isnan(self.validation)
        early = unknown and self.seconds > 7.5 * (settings.minutes or 0)
        return self.step % settings.looks.every == 0 or self.step == settings.all_steps or early

    def out_of_time(self, settings: Settings) -> bool:
        """Whether the time left is too short for a step and two evaluations (of the last and of the best weights).

        Always False before the first step: without one there is no model.
        """
        if settings.minutes is None or not self.step:
            return False
        return self.seconds + 3 * self.longest >= 60 * settings.minutes

    def over(self, settings: Settings) -> bool:
        patience = settings.looks.patience
        waited = patience is not None and self.waited >= patience
        return self.step >= settings.all_steps or waited or self.out_of_time(settings)


@shared_cores()
def train(
    objective: Objective,
    settings: Settings,
    monitor: Monitor,
    *,
    accelerator: Accelerator | None = None,
    state: dict[str, Any] | None = None,
    stop: Callable[[], int | None] = lambda: None,
    spent: float = 0.0,
) -> float:
    """Train `objective.model` in place and return its last validation loss.

    The batch and the random numbers of a step depend only on the seed, the step and the process. The monitor gets each
    step, each evaluation, and the state for each checkpoint. A call with that `state` continues bit for bit on the same
    machine, except with a time budget (`settings.minutes`).

    Args:
        objective: model, data, loss and evaluation.
        settings: steps, rates, precision, evaluation.
        monitor: gets the events.
        accelerator: of `accelerator_for(settings)`; None makes one.
        state: of a checkpoint to continue from.
        stop: called after each step; returns a signal's number to end the run, or None.
        spent: seconds of the time budget used before this call.

    Raises:
        Diverged: the loss or a gradient was not finite. The weights are those before the step.
        Stopped: `stop` returned a number; the monitor has a checkpoint of the last step.

    Example:
        >>> import math, torch, saccade
        >>> from saccade.training import Corpus, Execution, LanguageObjective, LanguageSettings, Monitor, train
        >>> model = saccade.models.DecoderLM(saccade.models.ModelConfig(5, width=8, layers=1, heads=2, context=4))
        >>> text = torch.arange(100) % 4 + 1  # 1 2 3 4 1 2 3 4 ...
        >>> settings = LanguageSettings(steps=40, batch=4, rate=0.02, warmup=2, execution=Execution(precision="no"))
        >>> loss = train(LanguageObjective(model, Corpus(text, text), 0, settings), settings, Monitor())
        >>> loss < math.log(5)  # better than chance
        True
    """
    run = _LoopState(objective, settings, accelerator or accelerator_for(settings))
    run.attention = monitor.attention(objective.model)
    progress = Progress(seconds=spent) if state is None else run.restore(state)
    if state is None:
        monitor.checkpoint(0, run.capture(progress))
    began = time.perf_counter() - progress.seconds
    while not progress.over(settings):
        rate = settings.rate_at(progress.step, progress.seconds)
        loss, norm = run.step(progress.step, rate, monitor)
        progress.step += 1
        progress.loss, progress.count = progress.loss + loss, progress.count + 1
        progress.tokens += run.tokens
        progress.moved_to(run.clock(began))
        monitor.step(progress.step, loss, norm, rate, progress.tokens / progress.seconds)
        if progress.look_due(settings) or progress.out_of_time(settings):
            evaluation = run.evaluate(progress.step)
            progress.validation = evaluation.loss
            counts, second = progress.step > settings.opening, None if evaluation.cost is None else evaluation.loss
            mean = progress.looked(evaluation.judged, settings.looks, counts=counts, loss=second)
            progress.moved_to(run.clock(began))
            monitor.evaluated(progress.step, mean, evaluation, progress.seconds, run.weights())
        number = stop()
        stopping = any_of(run.accelerator, number is not None)
        if stopping or progress.over(settings) or settings.looks.checkpoint_due(progress.step):
            monitor.checkpoint(progress.step, run.capture(progress))
        if stopping and not progress.over(settings):
            raise Stopped(number or 15)
    return progress.validation


class _LoopState:
    """The model as prepared by Accelerate, its optimizer, and one training step."""

    def __init__(self, objective: Objective, settings: Settings, accelerator: Accelerator):
        self.accelerator, self.settings, self.objective = accelerator, settings, objective
        objective.recompute_blocks(settings.execution.checkpointing)
        objective.share_sequences(settings.execution.context_parallel)
        self.model = objective.model
        self.prepared, self.optimizer = accelerator.prepare(self.model, make_optimizer(self.model, settings))
        self.attention: AttentionMonitor | None = None
        self.tokens = 0
        self._skipped = 0

    def clock(self, began: float) -> float:
        """Seconds since the run began. With a time budget all processes get the same, so that they stop together."""
        seconds = time.perf_counter() - began
        return seconds if self.settings.minutes is None else slowest(self.accelerator, seconds)

    def restore(self, state: dict[str, Any]) -> Progress:
        restore(state, self.accelerator, self.model, self.prepared, self.optimizer)
        return Progress(**state["progress"])

    def capture(self, progress: Progress) -> dict[str, Any]:
        state = capture(self.accelerator, self.model, self.prepared, self.optimizer)
        return {**state, "progress": dataclasses.asdict(progress)}

    def weights(self) -> dict[str, Tensor]:
        """The whole weights. If they are sharded, all processes must call this, and the main one gets them."""
        return whole_weights(self.accelerator, self.model, self.prepared)

    def evaluate(self, step: int) -> Evaluation:
        # The model without Accelerate's wrapper if possible: its weights need no gathering, and it is not recompiled.
        model = self.prepared if is_sharded(self.accelerator) else self.model
        share_statistics(self.accelerator, self.model)  # processes must compute the same loss to stop at the same step
        with memory_told(f"training: the evaluation after step {step}", lambda: LOOK_SMALLER):
            return self.objective.evaluate(model, self.accelerator)

    def step(self, step: int, rate: float, monitor: Monitor) -> tuple[float, float]:
        """One optimizer step. Returns the mean loss of its batch and the gradient norm before clipping."""
        settings = self.settings
        self.model.train(step >= settings.opening)
        for frozen in frozen_norms(self.model):
            frozen.eval()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self.objective.batch(step)
        self.tokens = self.objective.tokens(batch)
        with memory_told(f"training: step {step + 1}", lambda: self._smaller_parts(batch)), self._watched(step):
            loss = self._gradients(step, batch)
        norm = float(self.accelerator.clip_grad_norm_(self.prepared.parameters(), settings.clip))
        if not self._sound(loss, norm):
            self.optimizer.zero_grad()
            raise self._divergence(step, batch, loss)
        if (step + 1) % settings.looks.log_every == 0 and settings.looks.tensorboard:
            monitor.norms(step + 1, self._norms_before_clipping(norm), weight_norms(self.model))
        with memory_told(f"training: the optimizer at step {step + 1}", lambda: OPTIMIZER_SMALLER):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _smaller_parts(self, batch: Any) -> str:
        # Not with several processes: the others wait for this step's gradients, and would receive those of a trial.
        processes = self.accelerator.num_processes
        return smaller_parts(self.settings, processes, None if processes > 1 else functools.partial(self._fits, batch))

    def _fits(self, batch: Any, parts: int) -> bool:
        """Whether gradients fit in memory with so many micro-batches. Tries two: from the second on gradients exist."""
        self.optimizer.zero_grad()
        try:
            for part in own_parts(self.accelerator, self.objective.split, batch, parts)[:2]:
                self.accelerator.backward(self.objective.loss(self.model, part))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            return False
        return True

    def _watched(self, step: int) -> contextlib.AbstractContextManager[None]:
        if self.attention is None:
            return contextlib.nullcontext()
        scaler = self.accelerator.scaler
        return self.attention.step(step + 1, 1.0 if scaler is None else float(scaler.get_scale()))

    def _norms_before_clipping(self, norm: float) -> dict[str, float]:
        # Computed after clipping: the scaled loss can be unscaled only once.
        factor = max((norm + 1e-6) / self.settings.clip, 1.0) if math.isfinite(norm) else math.nan
        return {group: value * factor for group, value in gradient_norms(self.model).items()}

    def _gradients(self, step: int, batch: Any) -> float:
        """Accumulate the gradients of the weighted micro-batches; returns the mean loss over all processes."""
        accelerator, whole = self.accelerator, self.objective.weight(batch)
        total = torch.zeros((), device=accelerator.device)
        parts = self._parts(batch)
        for micro, part in enumerate(parts):
            self._seed(step, micro)
            share = self.objective.weight(part) / whole
            last = micro == len(parts) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.prepared):
                loss = self.objective.loss(self.prepared, part)
                # DDP averages gradients over processes, so losses are multiplied by the number of processes.
                accelerator.backward(loss * (share * accelerator.num_processes))
            total += loss.detach() * share
        return accelerator.reduce(total, "sum").item()

    def _parts(self, batch: Any) -> list[Any]:
        execution, split = self.settings.execution, self.objective.split
        return own_parts(self.accelerator, split, batch, execution.accumulate, execution.context_parallel)

    def _seed(self, step: int, micro: int) -> None:
        torch.manual_seed(step_seed(self.settings.seed, step, micro, self.accelerator.process_index))

    def _sound(self, loss: float, norm: float) -> bool:
        """Whether to apply the step. With fp16 the loss scaler skips overflowed steps itself."""
        if self.accelerator.scaler is None or not math.isfinite(loss):
            return math.isfinite(loss) and math.isfinite(norm)
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        return self._skipped <= MAX_SKIPPED

    def _divergence(self, step: int, batch: Any, loss: float) -> Diverged:
        """The error of a step that is not finite, after repeating its batch with every tensor checked."""
        what = f"loss became {loss}" if not math.isfinite(loss) else "gradient became non-finite"
        report = self._observed(step, batch)
        return Diverged(
            f"training: the {what} at step {step + 1}, first in {report.place}; the step was not made; "
            "try a smaller learning rate",
            report,
        )

    def _observed(self, step: int, batch: Any) -> AnomalyReport:
        reports = []
        if is_sharded(self.accelerator):
            return AnomalyReport(
                None, (), note="the weights are sharded among processes; run without FSDP to find the first tensor"
            )
        for micro, part in enumerate(self._parts(batch)):
            self._seed(step, micro)
            loss = functools.partial(self.objective.loss, self.model, part)
            reports.append(locate_anomaly(self.model, loss))
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            reports = gather_object(reports)
        return next((report for report in reports if report.found), reports[0])


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW without weight decay for vectors."""
    learning = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in learning if p.ndim >= 2], [p for p in learning if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, settings.beta2), fused=True)
