"""The training monitor as a callback of Lightning, whichever of its two names it is imported by."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..see.monitoring import Alarm, AttentionMonitor, Histogram, MonitorSettings, TensorBoardLog
from ..support._extras import installing

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AttentionCallback"]

NAMES = ("lightning.pytorch", "pytorch_lightning")


def callback_classes() -> tuple[type, ...]:
    """`Callback` of every Lightning in use, or of the first that is installed.

    Raises:
        ImportError: there is none.
    """
    used = [name for name in NAMES if name in sys.modules]
    found = used or [name for name in NAMES if importlib.util.find_spec(name.partition(".")[0]) is not None][:1]
    if not found:
        raise ImportError(f"lightning: is not installed ({installing('lightning')})")
    return tuple(importlib.import_module(name).Callback for name in found)


class LightningLog:
    """Writes to the loggers of a Lightning trainer: numbers to all, histograms and text to those that take them."""

    def __init__(self, loggers: Collection[Any]):
        self._loggers = list(loggers)
        self._writers = [TensorBoardLog(one.experiment) for one in loggers if hasattr(one.experiment, "add_scalar")]

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log_metrics(dict(values), step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        for writer in self._writers:
            writer.histograms(values, step)

    def text(self, tag: str, text: str, step: int) -> None:
        for writer in self._writers:
            writer.text(tag, text, step)


class AttentionCallback(*callback_classes()):  # type: ignore[misc]
    """Watches the attention of a LightningModule in every n-th optimizer step.

    `AttentionMonitor` describes what is written, and when alarms fire. The trainer's loggers get it (Lightning's
    default is TensorBoard): all of them the numbers, and those whose `experiment` takes them as a SummaryWriter does
    the histograms and the text. Steps are counted as in Lightning's loggers, from 0. With accumulated gradients a step
    is watched in all its batches. A checkpoint keeps what later steps are compared with.

    Args:
        log: as in `AttentionMonitor`; None is the trainer's loggers.
        options: the fields of `MonitorSettings`; after an alarm of `stop_on` the trainer is asked to stop.

    Example:
        >>> from saccade.integrations.lightning import AttentionCallback
        >>> callback = AttentionCallback(every=50, stop_on="error")  # Trainer(callbacks=[callback])
        >>> callback.alarms
        []
    """

    def __init__(self, log: Any = None, **options: Any):
        super().__init__()
        MonitorSettings(**options)  # what is wrong with them is said before training
        self._given, self._options = log, options
        self._state: dict[str, Any] | None = None
        self._begun: int | None = None
        self.monitor: AttentionMonitor | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """All that have fired so far."""
        return [] if self.monitor is None else self.monitor.alarms

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        log = (LightningLog(trainer.loggers) or False) if self._given is None else self._given
        self.monitor = AttentionMonitor(pl_module, log, **self._options)
        if self._state is not None:
            self.monitor.load_state_dict(self._state)
            self._state = None  # a training run that begins later is another one
        self._begun = None

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if self.monitor is None or step == self._begun:  # a later batch of the same step
            return
        self.monitor.end()
        self._begun = step
        self.monitor.begin(step, loss_scale(getattr(trainer.precision_plugin, "scaler", None)))

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._begun:
            self._end(trainer)

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        self._end(trainer)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        self._end(trainer)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._end(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def _end(self, trainer: Any) -> None:
        if self.monitor is None:
            return
        self.monitor.end()
        if self.monitor.should_stop is not None:
            trainer.should_stop = True


def loss_scale(scaler: Any) -> float:
    """The factor of a gradient scaler on the loss; 1 without one."""
    return 1.0 if scaler is None else float(scaler.get_scale())
