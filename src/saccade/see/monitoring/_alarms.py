"""Alarms: problems of attention while a model runs or learns, with layer, head and numbers.

The rules are in `_alarms_rules`; this file decides when an alarm begins, continues and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...support._lazy_names import renamed_arguments
from ._alarms_reading import CallReading, Numbers, StepRecord, StepRecords, joined, joined_steps, reading_of
from ._alarms_rules import ADVICE, NOT_FINITE, RULES, VANISHING, HeadHistory, RuleMatch, not_finite, vanishing_gradients
from ._alarms_thresholds import Thresholds
from ._record import CallRecord, GradientRecord

SEVERITIES: tuple[str, ...] = ("note", "warning", "error")


@dataclass(frozen=True)
class Alarm:
    """One problem of one head, from the step at which it begins.

    Attributes:
        kind: "entropy collapse", "saturated softmax", "logit growth", "uniform head", "dead head", "sink", "vanishing
            gradients" or "not finite".
        severity: "note" (normal in trained models), "warning", "error" (the numbers are lost).
        name, path, layer: of the call, see `CallSite`.
        head: the query head; of "not finite" keys and values the key-value head.
        step: when it began. last_step: its last reading. count: the number of readings with it.
        over: whether it has ended.
        message: the measurement in a sentence. advice: how to fix it.
        numbers: the first measurement. limits: the thresholds that decided.

    Example:
        >>> import torch, saccade
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> x = torch.randn(2, 32, 16)
        >>> x[0, 3] = torch.nan
        >>> with saccade.watch(model) as seen:
        ...     _ = model(x)
        >>> alarm = seen.alarms[0]
        >>> alarm.kind, alarm.severity, alarm.step
        ('not finite', 'error', 0)
    """

    kind: str
    severity: str
    name: str
    path: str
    layer: int
    head: int | None
    step: int
    message: str
    advice: str
    numbers: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    last_step: int = -1
    count: int = 1
    over: bool = False

    @property
    def place(self) -> str:
        """Layer, call and head in words."""
        head = "" if self.head is None else f", head {self.head}"
        return f"layer {self.layer} ({self.name or 'the model'}){head}"

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} in {self.place}, step {self.step}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """The alarm as values for JSON."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Alarm:
        return cls(**values)


@dataclass
class _OpenAlarm:
    """An alarm that has not ended, or may fire again."""

    alarm: Alarm
    absent: int = 0  # consecutive readings without its cause

    def count_reading(self, step: int) -> None:
        self.absent = 0
        self.alarm = replace(self.alarm, last_step=step, count=self.alarm.count + 1)


@dataclass
class _SiteHistory:
    """The state of one call site: two numbers per head, and rows that are not yet a reading."""

    past: list[HeadHistory]
    waiting: CallReading | None = None
    last: CallReading | None = None


class Alarms:
    """Reads the calls of a model and reports problems.

    An alarm fires once for each head and kind. It is counted while it lasts, and ends after `Thresholds.clear`
    consecutive readings without its cause; it can then fire again. For NaN and infinities only the first place fires;
    later places are counted there. Memory does not grow with the number of steps, except for the alarms themselves.

    Args:
        thresholds: limits of the alarms; None is `Thresholds()`.
        on_alarm: called with each alarm as it fires.

    Example:
        >>> import torch, saccade
        >>> from saccade.monitoring import Alarms
        >>> model = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=4))
        >>> x = torch.full((2, 32, 16), torch.nan)
        >>> alarms = Alarms()
        >>> with saccade.watch(model, alarms=False, on_record=alarms.observe):
        ...     _ = model(x)
        >>> [alarm.kind for alarm in alarms.fired]
        ['not finite']
    """

    @renamed_arguments(told="on_alarm")
    def __init__(self, thresholds: Thresholds | None = None, on_alarm: Callable[[Alarm], None] | None = None):
        self.thresholds = thresholds or Thresholds()
        self._told = on_alarm
        self._sites: dict[str, _SiteHistory] = {}
        self._cases: list[_OpenAlarm] = []
        self._open: dict[tuple[str, str, int | None], _OpenAlarm] = {}
        self._broken: _OpenAlarm | None = None

    @property
    def fired(self) -> list[Alarm]:
        """All alarms so far in the order in which they fired, ended ones included."""
        return [case.alarm for case in self._cases]

    def state_dict(self) -> dict[str, list[list[float]]]:
        """The history of the heads by call name, as lists, which a resumed run needs for comparison."""
        return {name: [list(vars(past).values()) for past in site.past] for name, site in self._sites.items()}

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Continue from the history that `state_dict` returned."""
        self._sites = {
            name: _SiteHistory([HeadHistory(*numbers) for numbers in heads]) for name, heads in state.items()
        }

    def observe(self, record: CallRecord, step: int | None = None) -> list[Alarm]:
        """The new alarms after one call; `step` replaces the record's own number."""
        step = record.step if step is None else step
        reading = reading_of(record, self.thresholds.keys, self.thresholds.sharp)
        site = self._sites.setdefault(record.name, _SiteHistory([HeadHistory() for _ in range(reading.heads)]))
        if reading.broken is not None:
            site.waiting = site.last = None
            return self._not_finite(not_finite(reading.broken), record, step)
        self._finite(record.name)
        return self._read(site, reading, record, step)

    def _observe_steps(self, parts: Sequence[StepRecords]) -> None:
        """As `observe` for each call of many steps."""
        found = []
        for part in parts:
            numbers, name = part.readings(self.thresholds.keys, self.thresholds.sharp), part.records[0].name
            site = self._sites.setdefault(name, _SiteHistory([HeadHistory() for _ in range(numbers.shape[1])]))
            self._finite(name)
            rows = numbers[0].cumsum(1) + np.reshape(0.0 if site.waiting is None else site.waiting.rows, (-1, 1))
            start = 0
            while start < rows.shape[1]:  # up to the call with which there are enough rows
                enough = rows[:, start:].max(0) >= self.thresholds.rows
                stop = start + int(enough.argmax()) + 1 if enough.any() else rows.shape[1]
                found.append(
                    (part.places[stop - 1], site, joined_steps(numbers[:, :, start:stop]), part.records[stop - 1])
                )
                rows, start = rows - rows[:, stop - 1 : stop], stop
        for _, site, reading, record in sorted(found, key=lambda at: at[0]):
            self._read(site, reading, record, record.step)

    def _read(
        self, site: _SiteHistory, reading: CallReading, record: CallRecord | StepRecord, step: int
    ) -> list[Alarm]:
        """The new alarms once there are enough rows with those of this reading."""
        whole = reading if site.waiting is None else joined([site.waiting, reading])
        if max(whole.rows) < self.thresholds.rows:
            site.waiting = whole
            return []
        whole = whole.only(self.thresholds.rows)
        site.waiting, site.last = None, whole
        for own, evenness, logit in zip(site.past, whole.evenness, whole.logit, strict=True):
            own.note(evenness, logit)
        matches = [finding for rule in RULES for finding in rule(whole, site.past, self.thresholds)]
        return self._settle(matches, record, step, judged=lambda kind: kind not in (VANISHING, NOT_FINITE))

    def observe_gradients(self, record: GradientRecord, step: int | None = None) -> list[Alarm]:
        """The new alarms after the gradients of one call, which are compared with its forward pass."""
        step = record.step if step is None else step
        site = self._sites.get(record.name)
        if site is None or site.last is None or not {"query", "key", "out"} <= record.gradients.keys():
            return []
        gradients = {name: _of_query_heads(g.tolist(), site.last.heads) for name, g in record.gradients.items()}
        matches = list(vanishing_gradients(site.last, gradients, site.past, self.thresholds))
        return self._settle(matches, record, step, judged=lambda kind: kind == VANISHING)

    def _settle(
        self,
        matches: Iterable[RuleMatch],
        record: CallRecord | GradientRecord | StepRecord,
        step: int,
        judged: Callable[[str], bool],
    ) -> list[Alarm]:
        """Fire new alarms, count continuing ones, and end those without their cause for long enough."""
        present, new = set(), []
        for finding in matches:
            at = (record.name, finding.kind, finding.head)
            present.add(at)
            if at in self._open:
                self._open[at].count_reading(step)
            else:
                self._open[at] = self._fire(finding, record, step)
                new.append(self._open[at].alarm)
        for at in [at for at in self._open if at[0] == record.name and judged(at[1]) and at not in present]:
            self._missed(at)
        return new

    def _missed(self, at: tuple[str, str, int | None]) -> None:
        case = self._open[at]
        case.absent += 1
        if case.absent >= self.thresholds.clear:
            case.alarm = replace(case.alarm, over=True)
            del self._open[at]

    def _fire(self, finding: RuleMatch, record: CallRecord | GradientRecord | StepRecord, step: int) -> _OpenAlarm:
        place: dict[str, Any] = {name: getattr(record, name) for name in ("name", "path", "layer")}
        alarm = Alarm(**vars(finding), **place, step=step, advice=ADVICE[finding.kind], last_step=step)
        case = _OpenAlarm(alarm)
        self._cases.append(case)
        if self._told is not None:
            self._told(alarm)
        return case

    def _not_finite(self, finding: RuleMatch, record: CallRecord, step: int) -> list[Alarm]:
        if self._broken is not None:
            self._broken.count_reading(step)
            return []
        self._broken = self._fire(finding, record, step)
        return [self._broken.alarm]

    def _finite(self, name: str) -> None:
        """The call at which NaN was first found is finite again: the next NaN is a new alarm."""
        if self._broken is not None and self._broken.alarm.name == name:
            self._broken.alarm = replace(self._broken.alarm, over=True)
            self._broken = None


def _of_query_heads(numbers: Sequence[float], heads: int) -> Numbers:
    group = heads // len(numbers)
    return tuple(number for number in numbers for _ in range(group))
