"""The training monitors as callbacks of the transformers Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..see.monitoring import Alarm, AttentionMonitor, Histogram, MonitorSettings, StackMonitor
from ..see.monitoring._monitor_log import tensorboard_in
from ..support._extras import installing
from ..verification import StackReport

try:
    from transformers import TrainerCallback
except ImportError:
    raise ImportError(f"transformers: is not installed ({installing('hf')})") from None

__all__ = ["AttentionCallback", "StackCallback"]

FOLDER = "attention"


class TrainerLog:
    """Writes numbers and text through `Trainer.log`, and so to everything that the Trainer reports to."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._log(dict(values))

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None:
        self._log({tag: text})

    def _log(self, values: dict[str, Any]) -> None:
        control = self._trainer.control
        due = control.should_log
        self._trainer.log(values)
        # The Trainer takes any log for the one that was due.
        control.should_log = due


class AttentionCallback(TrainerCallback):
    """Watches the attention of a model in every n-th optimizer step of a transformers Trainer.

    `AttentionMonitor` describes what is written, and when alarms fire. It is written for TensorBoard, into the folder
    `attention` within the Trainer's own (TENSORBOARD_LOGGING_DIR, or `runs` in its output folder).
    `callback.report_to(trainer)` sends the numbers to everything else that the Trainer reports to. Steps are counted as
    in the Trainer, from 1; with accumulated gradients all batches of a step are watched. The Trainer's checkpoints hold
    nothing of the monitor: after a resume alarms compare only with later steps.

    The Trainer does not tell callbacks of exceptions. If one ends the training in a watched step, call `close()` or
    train again: until then the forwards of the model are still watched.

    Args:
        log: as in `AttentionMonitor`; None is TensorBoard in the folder above.
        options: the fields of `MonitorSettings`; after an alarm of `stop_on` the trainer is asked to stop.

    Example:
        >>> from saccade.integrations.trainer import AttentionCallback
        >>> callback = AttentionCallback(every=50, stop_on="error")  # Trainer(model, args, callbacks=[callback], ...)
        >>> callback.alarms
        []
    """

    def __init__(self, log: Any = None, **options: Any):
        super().__init__()
        MonitorSettings(**options)  # what is wrong with them is said before training
        self._given, self._options = log, options
        self.monitor: AttentionMonitor | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms that have fired so far."""
        return [] if self.monitor is None else self.monitor.alarms

    def report_to(self, trainer: Any) -> AttentionCallback:
        """Write through `trainer.log` instead of a separate log. It takes no histograms: these are lost."""
        self._given = TrainerLog(trainer)
        return self

    def close(self) -> None:
        """Stop watching, if an exception has ended the training in a watched step."""
        if self.monitor is not None:
            self.monitor.end()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        self.close()
        self.monitor = None
        if state.is_world_process_zero:
            log = _own_log(args, state) if self._given is None else self._given
            self.monitor = AttentionMonitor(model, log, **self._options)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        if self.monitor is not None:
            self.monitor.end()
            self.monitor.begin(state.global_step + 1, _loss_scale(optimizer))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.close()
        if self.monitor is not None and self.monitor.should_stop is not None:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.close()


class StackCallback(TrainerCallback):
    """Verifies the stack of a Trainer before its first step, and every n-th step for about a second.

    `StackMonitor` describes what runs. The model, collator, tokenizer and training step are the Trainer's. Each of
    several processes verifies its own copy.

    Args:
        trainer: a transformers `Trainer`, or a trainer like it.
        options: of `StackMonitor`, such as `every` and `on_error`; and arguments of `saccade.verify_stack`.

    Example:
        >>> from saccade.integrations.trainer import StackCallback
        >>> def train(trainer):  # a transformers Trainer
        ...     trainer.add_callback(StackCallback(trainer, every=500))
        ...     trainer.train()  # raises saccade.verification.StackError before a step is made
    """

    def __init__(self, trainer: Any, **options: Any):
        super().__init__()
        self._trainer = trainer
        self._monitor = StackMonitor(None, trainer=trainer, **options)

    @property
    def report(self) -> StackReport | None:
        """The last report, None before the first step."""
        return self._monitor.report

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        with _without_autocast(self._trainer.model):
            self._monitor.step(state.global_step)


@contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """Within, the model's forward is its own: Accelerate's computes in half precision, whatever the weights."""
    wrapped = vars(model).get("forward")
    original = vars(model).get("_original_forward")
    if wrapped is None or original is None:
        yield
        return
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped


def _own_log(args: Any, state: Any) -> Any:
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs"
    return tensorboard_in(Path(folder).expanduser() / FOLDER, first_step=state.global_step + 1)


def _loss_scale(optimizer: Any) -> float:
    """The factor of Accelerate on the loss; 1 except in float16."""
    scaler = getattr(optimizer, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())
