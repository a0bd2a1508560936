"""The training loop: a straight line from windows to weights. Devices, processes and precision are Accelerate's.

Shape legend: B batch, L context, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import DecoderLM
from ..monitoring import AttentionMonitor
from .anomaly import AnomalyReport, find_anomaly
from .data import Corpus
from .evaluation import evaluate
from .norms import gradient_norms, weight_norms
from .processes import accelerator_for, any_of, is_sharded, own_rows
from .settings import EvaluationSettings, Settings
from .state import capture, restore, step_seed, whole_weights
from .stopping import Stopped
from .windows import draw_copying, draw_windows, whole_windows

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_SKIPPED = 20  # steps in a row that fp16's loss scaling may leave out before something else is wrong


class Monitor:
    """What the loop tells while it runs; every method may be overridden."""

    def step(self, step: int, loss: float, norm: float, rate: float, tokens_per_second: float) -> None: ...

    def norms(self, step: int, gradients: dict[str, float], weights: dict[str, float]) -> None: ...

    def evaluated(
        self, step: int, training_loss: float, validation_loss: float, seconds: float, weights: dict[str, Tensor]
    ) -> None: ...

    def checkpoint(self, step: int, state: dict[str, Any]) -> None: ...

    def attention(self, model: DecoderLM) -> AttentionMonitor | None:
        """What watches the model's attention, if anything does; asked once."""
        return None


class Diverged(ValueError):
    """The loss or a gradient is not a finite number; `report` says where that began."""

    def __init__(self, message: str, report: AnomalyReport):
        super().__init__(message)
        self.report = report


@dataclasses.dataclass
class Progress:
    """How far a run is. `loss` and `count` are of the steps since the last look."""

    step: int = 0
    loss: float = 0.0
    count: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation: float = math.nan
    mark: float = math.inf
    waited: int = 0

    def looked(self, validation: float, looks: EvaluationSettings, *, counts: bool) -> float:
        """Note the validation loss and return the mean training loss since the last look."""
        self.validation = validation
        if validation < self.mark - looks.improvement or not counts:
            self.mark, self.waited = min(validation, self.mark) if counts else math.inf, 0
        else:
            self.waited += 1
        mean = self.loss / max(self.count, 1)
        self.loss, self.count = 0.0, 0
        return mean

    def over(self, settings: Settings) -> bool:
        patience = settings.looks.patience
        return self.step >= settings.all_steps or (patience is not None and self.waited >= patience)


def train(
    model: DecoderLM,
    corpus: Corpus,
    start: int,
    settings: Settings,
    monitor: Monitor,
    *,
    accelerator: Accelerator | None = None,
    state: dict[str, Any] | None = None,
    stop: Callable[[], int | None] = lambda: None,
) -> float:
    """Train `model` in place and return its last validation loss (nats per token).

    What a step sees, and what is random in it, is a function of the seed, the step and the process. The monitor is told
    of each step and each look, and gets the whole state when a checkpoint is due; a call with that `state` continues
    from there bit for bit on the same machine.

    Args:
        model, corpus: what to train, and on what.
        start: the start token.
        settings: see there.
        monitor: see there.
        accelerator: of `accelerator_for(settings)`; None makes one.
        state: a checkpoint's, to continue from.
        stop: asked after each step; a signal's number ends the run.

    Raises:
        Diverged: the loss or a gradient was not finite. The step was not made.
        Stopped: `stop` said so; the monitor has been given a checkpoint of the last step.
    """
    run = _LoopState(model, corpus, start, settings, accelerator or accelerator_for(settings))
    run.attention = monitor.attention(model)
    progress = Progress() if state is None else run.restore(state)
    if state is None:
        monitor.checkpoint(0, run.capture(progress))
    began = time.perf_counter() - progress.seconds
    while not progress.over(settings):
        loss, norm = run.step(progress.step, monitor)
        progress.step += 1
        progress.loss, progress.count = progress.loss + loss, progress.count + 1
        progress.tokens += run.tokens
        progress.seconds = time.perf_counter() - began
        speed = progress.tokens / progress.seconds
        monitor.step(progress.step, loss, norm, settings.rate_at(progress.step - 1), speed)
        if progress.step % settings.looks.every == 0 or progress.step == settings.all_steps:
            validation = run.evaluate()
            mean = progress.looked(validation, settings.looks, counts=progress.step > settings.copying)
            monitor.evaluated(progress.step, mean, validation, progress.seconds, run.weights())
        number = stop()
        stopping = any_of(run.accelerator, number is not None)
        if stopping or progress.over(settings) or settings.looks.checkpoint_due(progress.step):
            monitor.checkpoint(progress.step, run.capture(progress))
        if stopping and not progress.over(settings):
            raise Stopped(number or 15)
    return progress.validation


class _LoopState:
    """The model where Accelerate has put it, and what one step does to it."""

    def __init__(self, model: DecoderLM, corpus: Corpus, start: int, settings: Settings, accelerator: Accelerator):
        self.accelerator, self.settings = accelerator, settings
        self._corpus, self._start = corpus, start
        whole = whole_windows(corpus.validation, start=start, context=model.config.context)
        self._validation = spread(whole, settings.looks.evaluate_windows)
        model.decoder.checkpointing = settings.execution.checkpointing
        self.model = model
        self.prepared, self.optimizer = accelerator.prepare(model, make_optimizer(model, settings))
        self.attention: AttentionMonitor | None = None
        self.tokens = 0
        self._skipped = 0

    def restore(self, state: dict[str, Any]) -> Progress:
        restore(state, self.accelerator, self.model, self.prepared, self.optimizer)
        return Progress(**state["progress"])

    def capture(self, progress: Progress) -> dict[str, Any]:
        state = capture(self.accelerator, self.model, self.prepared, self.optimizer)
        return {**state, "progress": dataclasses.asdict(progress)}

    def weights(self) -> dict[str, Tensor]:
        """The weights in one piece; where they are sharded, all processes call this and the main one gets them."""
        return whole_weights(self.accelerator, self.model, self.prepared)

    def evaluate(self) -> float:
        # Weights in one piece need no gathering, and the model as it is no compiling for another batch.
        model = self.prepared if is_sharded(self.accelerator) else self.model
        return evaluate(model, self._validation, accelerator=self.accelerator)

    def step(self, step: int, monitor: Monitor) -> tuple[float, float]:
        """One optimizer step: the mean loss over all its tokens, and the gradient's norm before it is clipped."""
        settings = self.settings
        self.model.train(step >= settings.copying)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate_at(step)
        windows = draw(step, self._corpus.training, self._start, self.model.config.vocabulary, self.context, settings)
        self.tokens = windows[:, 1:].numel()
        with self._watched(step):
            loss = self._gradients(step, windows)
        norm = float(self.accelerator.clip_grad_norm_(self.prepared.parameters(), settings.clip))
        if not self._sound(loss, norm):
            self.optimizer.zero_grad()
            raise self._divergence(step, windows, loss)
        if (step + 1) % settings.looks.log_every == 0 and settings.looks.tensorboard:
            monitor.norms(step + 1, self._norms_before_clipping(norm), weight_norms(self.model))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _watched(self, step: int) -> contextlib.AbstractContextManager[None]:
        if self.attention is None:
            return contextlib.nullcontext()
        scaler = self.accelerator.scaler
        return self.attention.step(step + 1, 1.0 if scaler is None else float(scaler.get_scale()))

    def _norms_before_clipping(self, norm: float) -> dict[str, float]:
        # Looked at afterwards, when a scaled loss has been undone, which can be done but once.
        factor = max((norm + 1e-6) / self.settings.clip, 1.0) if math.isfinite(norm) else math.nan
        return {group: value * factor for group, value in gradient_norms(self.model).items()}

    @property
    def context(self) -> int:
        return self.model.config.context

    def _gradients(self, step: int, windows: Tensor) -> float:
        """Add up the gradients of the micro-batches, weighted by tokens; the loss over all processes' tokens."""
        accelerator, accumulate = self.accelerator, self.settings.execution.accumulate
        total = torch.zeros((), device=accelerator.device)
        rows = own_rows(accelerator, windows, accumulate)
        for micro, part in enumerate(rows):
            self._seed(step, micro)
            share = part.shape[0] / windows.shape[0]
            last = micro == len(rows) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.prepared):
                loss = loss_of(self.prepared, part)
                # Processes' gradients are averaged, so each counts as many times as there are processes.
                accelerator.backward(loss * (share * accelerator.num_processes))
            total += loss.detach() * share
        return accelerator.reduce(total, "sum").item()

    def _seed(self, step: int, micro: int) -> None:
        torch.manual_seed(step_seed(self.settings.seed, step, micro, self.accelerator.process_index))

    def _sound(self, loss: float, norm: float) -> bool:
        """Whether the step may be made. Where fp16 scales the loss, its own scaler leaves out steps that overflowed."""
        if self.accelerator.scaler is None or not math.isfinite(loss):
            return math.isfinite(loss) and math.isfinite(norm)
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        return self._skipped <= MAX_SKIPPED

    def _divergence(self, step: int, windows: Tensor, loss: float) -> Diverged:
        """Run the same batch again, with everything observed."""
        what = f"loss became {loss}" if not math.isfinite(loss) else "gradient became non-finite"
        report = self._observed(step, windows)
        return Diverged(
            f"training: the {what} at step {step + 1}, first in {report.place}; the step was not made; "
            "try a smaller learning rate",
            report,
        )

    def _observed(self, step: int, windows: Tensor) -> AnomalyReport:
        reports = []
        if is_sharded(self.accelerator):
            return AnomalyReport(
                None, (), note="weights are sharded among processes: run again without FSDP to find the place"
            )
        for micro, part in enumerate(own_rows(self.accelerator, windows, self.settings.execution.accumulate)):
            self._seed(step, micro)
            reports.append(find_anomaly(self.model, part))
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            reports = gather_object(reports)
        return next((report for report in reports if report.found), reports[0])


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood of the tokens behind the first of each window (B, L + 1), in nats."""
    logits = model(windows[:, :-1])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def draw(step: int, tokens: Tensor, start: int, vocabulary: int, context: int, settings: Settings) -> Tensor:
    """The windows of a step, of all processes together: a function of the arguments."""
    seed, batch = settings.seed, settings.batch
    if step < settings.copying:
        return draw_copying(vocabulary, start=start, context=context, batch=batch, seed=seed, step=step)
    return draw_windows(
        tokens,
        start=start,
        context=context,
        batch=batch,
        seed=seed,
        step=step - settings.copying,
        repeats=settings.repeats,
    )


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """AdamW; vectors have no weight decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.rate, betas=(0.9, settings.beta2), fused=True)


def spread(windows: Tensor, count: int | None) -> Tensor:
    """`count` windows spread evenly over all; all, when there are not more or `count` is None."""
    if count is None or count >= windows.shape[0]:
        return windows
    return windows[torch.arange(count) * windows.shape[0] // count]
