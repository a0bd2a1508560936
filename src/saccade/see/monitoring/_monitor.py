"""A training monitor for any framework: watches every n-th step, and logs numbers and alarms."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._alarms import SEVERITIES, Alarm, Alarms
from ._alarms_rules import ADVICE
from ._alarms_thresholds import Thresholds
from ._monitor_log import Histogram, MonitorLog, NullLog, as_log
from ._record import CallRecord, GradientRecord
from ._watch import ModelWatch, watch

LOGGER = logging.getLogger("saccade.monitoring")
VECTORS = ("query", "key", "value")
_MEANS = ("entropy", "evenness", "largest")


@dataclass(frozen=True)
class MonitorSettings:
    """The settings of a monitor.

    Args:
        every: the first step and multiples of this number are watched.
        per_head: also write the numbers of each head.
        gradients: whether to measure the gradients of q, k, v and out.
        histograms: whether to log histograms of q, k, v.
        thresholds: limits of the alarms; None is `Thresholds()`.
        on_alarm: called with each `Alarm` as it fires; None writes a line to the logger "saccade.monitoring".
        stop_on: kinds or severities of alarms after which the callbacks of frameworks stop training.

    Raises:
        ValueError: every is not a positive whole number, or stop_on has an unknown kind.

    Example:
        >>> from saccade.monitoring import MonitorSettings
        >>> settings = MonitorSettings(every=100, stop_on="error")
        >>> settings.stopping
        {'error'}
    """

    every: int = 50
    per_head: bool = False
    gradients: bool = True
    histograms: bool = True
    thresholds: Thresholds | None = None
    on_alarm: Callable[[Alarm], None] | None = None
    stop_on: Collection[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"every: must be a whole number of steps from 1 on, got {self.every!r}")
        known = {*SEVERITIES, *ADVICE}
        for name in self.stopping - known:
            raise ValueError(f"stop_on: {name!r} is none of {', '.join(sorted(known))}")

    @property
    def stopping(self) -> set[str]:
        return {self.stop_on} if isinstance(self.stop_on, str) else set(self.stop_on)


class AttentionMonitor:
    """Watches the attention of a model in every n-th training step, and logs numbers and alarms.

    Other steps run as without a monitor. Under `attention/<call>/`, <call> being the module's path with two-digit
    numbers, each watched step logs: `entropy` and `entropy_lowest` (nats, the mean over heads and the lowest head's),
    `evenness` (entropy divided by its maximum), `largest` (mean largest weight), `sink_mass` and `sink_mass_highest`
    (weight on the first key and on a learned sink), `max_logit` (of all heads), `norm_query`, `norm_key`, `norm_value`,
    `norm_out` (mean L2 norms), `gradient_query`, `gradient_key`, `gradient_value`, `gradient_out` (L2 norms over the
    batch and all heads; a float16 loss scale is divided out), and the histograms `query`, `key`, `value` of all
    entries. `per_head=True` adds the numbers of each head under `attention/<call>/head_03/`. Alarms are text under
    `attention/alarms`, and `attention/alarms_open` counts alarms that have not ended. Unobserved calls are reported
    once through Python's `logging`.

    Training always continues: alarms raise no exception. An error of the log ends the log, any other error ends the
    monitor, and each is reported once. With several processes only the first one watches, and sees only its share of a
    batch.

    Args:
        model: the model; modules within it that run on their own are watched as well.
        log: a folder for TensorBoard (None: a new one in `runs`), a `SummaryWriter`, a `MonitorLog`, or False for none.
        options: the fields of `MonitorSettings`.

    Raises:
        TypeError: a log of another type, or an unknown option.
        ValueError: an invalid value for `MonitorSettings`.
        ModuleNotFoundError: a TensorBoard log without TensorBoard.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> monitor = saccade.monitoring.AttentionMonitor(model, log=False, every=2)  # a folder: TensorBoard
        >>> for step in range(3):
        ...     with monitor.step(step):
        ...         model(torch.randn(2, 5, 16)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> monitor.alarms, monitor.should_stop
        ([], None)
    """

    def __init__(self, model: nn.Module, log: Any = None, **options: Any):
        self._model, self._options = model, MonitorSettings(**options)
        self._off = not _first_process()
        self._log: MonitorLog = NullLog() if self._off else as_log(log)
        self._alarms = Alarms(self._options.thresholds)
        self._watched: ModelWatch | None = None
        self._step, self._seen_one = 0, False
        self._scale = 1.0
        self._tallies: dict[str, StepTally] = {}
        self._new: list[Alarm] = []
        self._mentioned: set[str] = set()
        self.should_stop: Alarm | None = None

    @property
    def alarms(self) -> list[Alarm]:
        """All alarms so far."""
        return self._alarms.fired

    @property
    def watching(self) -> bool:
        """Whether a step is being watched."""
        return self._watched is not None

    @contextmanager
    def step(self, step: int, loss_scale: float = 1.0) -> Iterator[None]:
        """Watch the forward and backward passes of this step if it is due; `step` counts optimizer steps."""
        self.begin(step, loss_scale)
        try:
            yield
        finally:
            self.end()

    def begin(self, step: int, loss_scale: float = 1.0) -> bool:
        """Begin to watch if this step is due, and return whether it is. `end` must follow.

        Args:
            loss_scale: what the loss is multiplied by before the backward pass (float16): gradients are divided by it.
        """
        if self._off or self.watching or not (step % self._options.every == 0 or not self._seen_one):
            return False
        self._step, self._seen_one, self._scale = step, True, loss_scale
        with self._ending_on_error():
            watched = watch(
                self._model,
                gradients=self._options.gradients,
                alarms=False,
                histograms=set(VECTORS) if self._options.histograms else None,
                on_record=self._record,
                on_gradients=self._gradients,
            )
            watched.__enter__()
            self._watched = watched
        return self.watching

    def end(self) -> None:
        """Stop watching and log the results; does nothing if no step is watched."""
        watched, self._watched = self._watched, None
        if watched is None:
            return
        with self._ending_on_error():
            watched.__exit__(None, None, None)
            self._warn_once(watched)
            self._write()
            self._tell()
        self._tallies, self._new = {}, []

    def state_dict(self) -> dict[str, Any]:
        """The history that later steps are compared with, as lists."""
        return {"alarms": self._alarms.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the history of a stopped run."""
        self._alarms.load_state_dict(state["alarms"])

    def _record(self, record: CallRecord) -> None:
        with self._ending_on_error():
            self._tallies.setdefault(record.name, StepTally()).add(record)
            self._new += self._alarms.observe(record, self._step)

    def _gradients(self, record: GradientRecord) -> None:
        with self._ending_on_error():
            self._tallies.setdefault(record.name, StepTally()).add_gradients(record, self._scale)
            self._new += self._alarms.observe_gradients(record, self._step)

    def _warn_once(self, watched: ModelWatch) -> None:
        """Warn once about calls that are not observed, and about unknown properties of calls."""
        missing = [f"not observed: {name}: {missed.reason}" for name, missed in watched.unobserved.items()]
        if not watched.calls and not missing:
            missing = [f"not observed: {type(self._model).__name__}: it made no attention call"]
        for line in (*missing, *(f"not known: {name}: {what.reason}" for name, what in watched.unknown.items())):
            if line not in self._mentioned:
                self._mentioned.add(line)
                LOGGER.warning("step %d: %s", self._step, line)

    def _write(self) -> None:
        scalars: dict[str, float] = {}
        histograms: dict[str, Histogram] = {}
        for name, tally in self._tallies.items():
            at, heads = f"attention/{tag_of(name)}", tally.heads()
            scalars |= {f"{at}/{what}": number for what, number in of_layer(heads).items()}
            if self._options.per_head:
                each = ((what, n, number) for what, numbers in heads.items() for n, number in enumerate(numbers))
                scalars |= {f"{at}/head_{n:02d}/{what}": number for what, n, number in each}
            histograms |= {f"{at}/{what}": held for what, held in tally.histograms()}
        scalars["attention/alarms_open"] = sum(not alarm.over for alarm in self.alarms)
        text = "\n\n".join(f"{line}. {ADVICE[kind]}" for kind, line in grouped(self._new))
        try:
            if histograms:
                self._log.histograms(histograms, self._step)
            if text:
                self._log.text("attention/alarms", text, self._step)
            self._log.scalars(scalars, self._step)
        except Exception as error:
            self._log = NullLog()
            LOGGER.warning("step %d: the log of the attention monitor ends here: %s", self._step, _in_words(error))

    def _tell(self) -> None:
        stopping, on_alarm = self._options.stopping, self._options.on_alarm
        for alarm in self._new:
            if self.should_stop is None and {alarm.kind, alarm.severity} & stopping:
                self.should_stop = alarm
            if on_alarm is not None:
                on_alarm(alarm)
        if on_alarm is None:
            for kind, line in grouped(self._new):
                LOGGER.log(_LEVELS[worst(self._new, kind)], "%s; %s", line, ADVICE[kind])

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """End the monitor, not the training, on an exception."""
        if self._off:
            return (yield)
        try:
            yield
        except Exception as error:
            self._off = True
            LOGGER.warning("step %d: the attention monitor ends here: %s", self._step, _in_words(error))


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def grouped(alarms: Iterable[Alarm]) -> Iterator[tuple[str, str]]:
    """(kind, sentence) for each kind and call, with all its heads and the message of the first."""
    by: dict[tuple[str, str], list[Alarm]] = {}
    for alarm in alarms:
        by.setdefault((alarm.kind, alarm.name), []).append(alarm)
    for (kind, _), group in by.items():
        heads = sorted(alarm.head for alarm in group if alarm.head is not None)
        others = f" (also heads {', '.join(map(str, heads[1:]))})" if len(heads) > 1 else ""
        yield kind, f"{group[0]}{others}"


def worst(alarms: Iterable[Alarm], kind: str) -> str:
    return max((alarm.severity for alarm in alarms if alarm.kind == kind), key=SEVERITIES.index)


def tag_of(name: str) -> str:
    """A call's name as a tag that sorts: "blocks.3.attention#2" is "blocks.03.attention.call_2"."""
    path, _, order = name.partition("#")
    padded = re.sub(r"(?<![^.])\d(?![^.])", lambda match: f"0{match[0]}", path or "model")
    return f"{padded}.call_{order}" if order else padded


def _first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


class StepTally:
    """Adds up the calls of a step at one site; with accumulated gradients each micro-batch has a call."""

    def __init__(self) -> None:
        self._rows: Tensor | float = 0.0
        self._sums: Tensor | float = 0.0
        self._logit: Tensor | None = None
        self._calls = 0
        self._norms: Tensor | float = 0.0
        self._squares: dict[str, Tensor] = {}
        self._histograms: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, record: CallRecord) -> None:
        measured, heads = record.statistics, record.statistics.heads
        sinks = measured.mean("mass.first") + measured.mean("mass.sink")
        means = torch.stack([*(measured.mean(n) for n in _MEANS), sinks])
        rows = measured.counted.sum((0, 2))
        self._rows = self._rows + rows
        self._sums = self._sums + torch.where(rows > 0, means, 0.0) * rows
        logit = heads["logits"]["max"]
        self._logit = logit if self._logit is None else torch.maximum(self._logit, logit)
        norms = [heads[name]["norm"] for name in VECTORS if name in heads]
        by_query_head = (norm.repeat_interleave(len(logit) // len(norm)) for norm in norms)
        self._norms = self._norms + torch.stack([*by_query_head, record.out_norm])
        self._calls += 1
        for name in VECTORS:
            if "counts" in heads.get(name, {}):
                self._histograms.setdefault(name, []).append((heads[name]["edges"], heads[name]["counts"]))

    def add_gradients(self, record: GradientRecord, scale: float) -> None:
        for name, norm in record.gradients.items():
            square = (norm.double() / scale) ** 2
            self._squares[name] = square if name not in self._squares else self._squares[name] + square

    def heads(self) -> dict[str, list[float]]:
        """Lists of a number for each head, by name; gradients of keys and values are by key-value head."""
        if self._logit is None:
            return {}
        assert isinstance(self._sums, Tensor) and isinstance(self._norms, Tensor)
        means = self._sums / self._rows
        names = [*_MEANS, "sink_mass", "max_logit", *(f"norm_{name}" for name in self._normed)]
        numbers = torch.cat([means, self._logit[None], self._norms / self._calls]).double().tolist()
        gradients = {f"gradient_{name}": square.sqrt().tolist() for name, square in self._squares.items()}
        return {**dict(zip(names, numbers, strict=True)), **gradients}

    @property
    def _normed(self) -> list[str]:
        assert isinstance(self._norms, Tensor)
        return [*VECTORS, "out"] if len(self._norms) == len(VECTORS) + 1 else [*VECTORS[:2], "out"]

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """One histogram over all heads for the queries, the keys and the values."""
        for name, held in self._histograms.items():
            edges, counts = (torch.cat([pair[n] for pair in held]).tolist() for n in (0, 1))
            sound = [(e, c) for e, c in zip(edges, counts, strict=True) if math.isfinite(e[0]) and math.isfinite(e[-1])]
            yield name, Histogram.together([e for e, _ in sound], [c for _, c in sound])


def of_layer(heads: dict[str, list[float]]) -> dict[str, float]:
    """Numbers of a call as a whole: means over heads, but the largest logit and the norm of all gradients."""
    shown: dict[str, float] = {}
    for name, numbers in heads.items():
        known = [number for number in numbers if not math.isnan(number)] or [math.nan]
        if name == "max_logit":
            shown[name] = max(known)
        elif name.startswith("gradient_"):
            shown[name] = math.hypot(*numbers)
        else:
            shown[name] = sum(known) / len(known)
        if name == "entropy":
            shown["entropy_lowest"] = min(known)
        if name == "sink_mass":
            shown["sink_mass_highest"] = max(known)
    return shown
