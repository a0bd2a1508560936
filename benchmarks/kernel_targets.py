"""The speeds that the native kernels are held to: each target is a group of measurements and what is asked of them.

A requirement is a share of the limit, a speed-up, a ratio of times, a growth or an amount of memory; it names rows by
their place in the group. B = 1, H = 8, D = 64 and 128, unless a target says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from saccade import _numbers
from saccade.benchmark.attention.cases import Case, decoding
from saccade.benchmark.attention.contenders import FlexAttention, SaccadeAttention, SdpaAttention
from saccade.benchmark.attention.measuring import Entry, MeasurementSettings, Told, measure, with_memory
from saccade.benchmark.attention.results import BenchmarkReport, Measurement, MeasurementGroup, RequirementOutcome
from saccade.benchmark.attention.statistics import Quartiles, exponent

WIDTHS = (64, 128)
LONG = (2048, 4096, 8192, 16384)
SETTLED = 4096  # from here on a share of the limit is asked of a forward
WINDOW = "window:256"


class Requirement(ABC):
    """bound: what is asked for, at least or at most by `upward`."""

    bound: float
    upward = True

    @abstractmethod
    def value(self, group: MeasurementGroup) -> Quartiles | float | None:
        """What was measured; None where it could not be."""

    @abstractmethod
    def shown(self, value: float) -> str: ...

    @abstractmethod
    def words(self, group: MeasurementGroup) -> str:
        """What is asked, after "at least" and the bound."""

    def outcome(self, target: str, group: MeasurementGroup) -> RequirementOutcome:
        value = self.value(group)
        asked = f"{'at least' if self.upward else 'at most'} {self.shown(self.bound)} {self.words(group)}"
        if value is None:
            reasons = [f"{row.contender}: {row.note}" for row in group.rows if row.status != "measured" and row.note]
            return RequirementOutcome(target, asked, None, reasons[0] if reasons else "not known", False)
        middle = value.median if isinstance(value, Quartiles) else value
        text = self.shown(middle)
        if isinstance(value, Quartiles):
            text += f" ({self.shown(value.low)} to {self.shown(value.high)})"
        return RequirementOutcome(
            target, asked, middle, text, middle >= self.bound if self.upward else middle <= self.bound
        )


@dataclass(frozen=True)
class LimitShare(Requirement):
    """The rate as a part of the machine's limit."""

    bound: float
    row: int = 0

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.share(group.rows[self.row])

    def shown(self, value: float) -> str:
        return _numbers.tenths_of_percent(value)

    def words(self, group: MeasurementGroup) -> str:
        return f"of {group.rows[self.row].limit or 'the limit'}"


@dataclass(frozen=True)
class SpeedupRequirement(Requirement):
    """How many times faster one row is than another, round by round."""

    bound: float
    row: int = 0
    over: int = 1

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.speedup(group.rows[self.row], group.rows[self.over])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return f"the speed of {group.rows[self.over].contender}"


@dataclass(frozen=True)
class RelativeTime(Requirement):
    """The time of one row in units of another's."""

    bound: float
    of: str
    row: int = 0
    unit: int = 1
    upward = False

    def value(self, group: MeasurementGroup) -> Quartiles | None:
        return group.speedup(group.rows[self.unit], group.rows[self.row])

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return self.of


@dataclass(frozen=True)
class TimeGrowth(Requirement):
    """The exponent of time in length, over rows that differ in length."""

    bound: float
    rows: tuple[int, ...]
    upward = False

    def value(self, group: MeasurementGroup) -> float | None:
        rows = [group.rows[place] for place in self.rows]
        seconds = [row.seconds for row in rows]
        medians = [found.median for found in seconds if found is not None]
        return exponent([row.case.length_k for row in rows], medians) if len(medians) == len(rows) else None

    def shown(self, value: float) -> str:
        return f"L^{value:.3f}"

    def words(self, group: MeasurementGroup) -> str:
        ends = group.rows[self.rows[0]].case, group.rows[self.rows[-1]].case
        return f"from L={_numbers.length(ends[0].length_k)} to {_numbers.length(ends[1].length_k)}"


@dataclass(frozen=True)
class ExtraMemory(Requirement):
    """Peak memory above inputs and gradients, in units of the bytes of query, key, value and output."""

    bound: float
    row: int = 0
    upward = False

    def value(self, group: MeasurementGroup) -> float | None:
        row = group.rows[self.row]
        return None if row.memory is None else row.memory.extra / row.case.bytes_in_and_out

    def shown(self, value: float) -> str:
        return f"{value:.2f}x"

    def words(self, group: MeasurementGroup) -> str:
        return "the bytes of q, k, v and out"


@dataclass(frozen=True)
class PerformanceTarget:
    """weighed: memory is measured, and no time."""

    title: str
    entries: tuple[Entry, ...]
    asks: tuple[Requirement, ...]
    weighed: bool = False


@dataclass(frozen=True)
class TargetBounds:
    """Least share of the limit and least speed over F.sdpa of one stage, dtype and mask."""

    stage: str
    dtype: str
    mask: str
    share: float
    faster: float


BOUNDS = (
    TargetBounds("forward", "float32", "full", 0.72, 2.1),
    TargetBounds("forward", "float32", "causal", 0.66, 2.3),
    TargetBounds("forward+backward", "float32", "full", 0.60, 1.9),
    TargetBounds("forward+backward", "float32", "causal", 0.52, 2.2),
    TargetBounds("forward", "bfloat16", "full", 0.70, 4.0),
    TargetBounds("forward", "bfloat16", "causal", 0.64, 4.2),
    TargetBounds("forward+backward", "bfloat16", "full", 0.50, 2.2),
    TargetBounds("forward+backward", "bfloat16", "causal", 0.42, 2.5),
)


@dataclass(frozen=True)
class TargetPreset:
    """Which backend is held to them, and on what.

    subject: the backend whose kernels are measured; choice: the one that picks a kernel by itself.
    lower: the instruction set that is forced for the target of that name. cache: bytes of the last-level cache.
    """

    subject: str = "native"
    choice: str = "auto"
    lower: str = "avx2"
    cache: int = 32 * 2**20
    quick: bool = False

    @property
    def widths(self) -> tuple[int, ...]:
        return WIDTHS[:1] if self.quick else WIDTHS

    def up_to(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """A quick run leaves out what takes long."""
        return tuple(length for length in lengths if length <= SETTLED) if self.quick else lengths


def targets(preset: TargetPreset) -> list[PerformanceTarget]:
    """All of them, in the order in which they are measured."""
    return [
        *_long(preset),
        *_medium(preset),
        *_lower_set(preset),
        *_windows(preset),
        *_half_of_the_work(preset),
        *_decoding(preset),
        *_small(preset),
        *_memory(preset),
    ]


def _of(length: int, width: int, **others: object) -> Case:
    return Case(length, length, width=width, value_width=width, **others)  # type: ignore[arg-type]


def _against_sdpa(case: Case, subject: str, *asks: Requirement) -> PerformanceTarget:
    return PerformanceTarget(case.label, (Entry(case, SaccadeAttention(subject)), Entry(case, SdpaAttention())), asks)


def _long(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for bounds in BOUNDS:
        for width in preset.widths:
            for length in preset.up_to(LONG):
                case = _of(length, width, mask=bounds.mask, stage=bounds.stage, dtype=bounds.dtype)
                shared = bounds.stage != "forward" or length >= SETTLED
                share = (LimitShare(bounds.share),) if shared else ()
                yield _against_sdpa(case, preset.subject, *share, SpeedupRequirement(bounds.faster))


def _medium(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for dtype, least in (("float32", 1.5), ("bfloat16", 3.0)):
        for mask in ("full", "causal"):
            for width in preset.widths:
                for length in (256, 512, 1024):
                    case = _of(length, width, mask=mask, dtype=dtype)
                    yield _against_sdpa(case, preset.subject, SpeedupRequirement(least))


def _lower_set(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for width in preset.widths:
        case = _of(4096, width)
        title = f"{case.label} on {preset.lower}"
        yield PerformanceTarget(
            title, (Entry(case, SaccadeAttention(preset.subject, preset.lower)),), (LimitShare(0.70),)
        )


def _windows(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for dtype in ("float32", "bfloat16"):
        for width in preset.widths:
            case = _of(8192, width, mask=WINDOW, dtype=dtype)
            ours = SaccadeAttention(preset.subject)
            yield PerformanceTarget(
                case.label, (Entry(case, ours), Entry(case, FlexAttention())), (SpeedupRequirement(3.0),)
            )
            lengths = (8192, 16384, 32768, 65536)
            longer = [replace(case, length_q=length, length_k=length) for length in lengths]
            title = f"{case.label} to L={_numbers.length(lengths[-1])}"
            yield PerformanceTarget(
                title, tuple(Entry(one, ours) for one in longer), (TimeGrowth(1.05, tuple(range(len(longer)))),)
            )
            alone = replace(case, stage="backward")
            entries = (Entry(alone, ours), Entry(replace(case, stage="recorded"), ours))
            yield PerformanceTarget(alone.label, entries, (RelativeTime(3.3, "the time of its forward"),))


def _half_of_the_work(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    ours = SaccadeAttention(preset.subject)
    for mask, batch in (("padding:half", 4), ("documents:2", 1)):
        for dtype in ("float32", "bfloat16"):
            for stage in ("forward", "forward+backward"):
                for width in preset.widths:
                    half = _of(4096, width, mask=mask, dtype=dtype, stage=stage, batch=batch)
                    whole = replace(half, mask="full")
                    asks = (RelativeTime(0.6, f"the time of the full call (work {_numbers.percent(half.work)})"),)
                    yield PerformanceTarget(half.label, (Entry(half, ours), Entry(whole, ours)), asks)


def _decoding(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    for dtype in ("float32", "bfloat16"):
        for width in preset.widths:
            case = decoding(4 * preset.cache, _of(1, width, stage="decode", dtype=dtype))
            yield _against_sdpa(case, preset.subject, LimitShare(0.80), SpeedupRequirement(1.0))


def _small(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    lengths = (16, 64, 256) if preset.quick else (16, 32, 64, 128, 256)
    for dtype in ("float32", "bfloat16"):
        for stage in ("forward", "forward+backward"):
            for mask in ("full", "causal"):
                for batch in (1, 4, 12):
                    for length in lengths:
                        case = _of(length, 64, mask=mask, stage=stage, dtype=dtype, batch=batch)
                        target = _against_sdpa(case, preset.choice, SpeedupRequirement(1.0))
                        yield replace(target, title=f"{target.title} through {preset.choice}")


def _memory(preset: TargetPreset) -> Iterator[PerformanceTarget]:
    length = SETTLED if preset.quick else 32768
    for dtype in ("float32", "bfloat16"):
        for mask in ("full", "causal"):
            for width in preset.widths:
                case = _of(length, width, mask=mask, stage="forward+backward", dtype=dtype)
                title = f"memory of {case.label}"
                yield PerformanceTarget(
                    title, (Entry(case, SaccadeAttention(preset.subject)),), (ExtraMemory(1.5),), weighed=True
                )


def hold_to(
    targets: Iterable[PerformanceTarget], report: BenchmarkReport, settings: MeasurementSettings, told: Told
) -> None:
    """Measure targets and judge them."""
    for target in targets:
        take = weigh if target.weighed else measure
        group = take(target.title, target.entries, settings)
        report.groups.append(group)
        report.outcomes += [ask.outcome(target.title, group) for ask in target.asks]
        told(group)


def weigh(title: str, entries: Sequence[Entry], settings: MeasurementSettings) -> MeasurementGroup:
    """The peak memory of each entry, without times: for cases whose times are of no interest."""
    rows = [
        with_memory(Measurement(entry.case, entry.contender.name, "measured"), entry, settings) for entry in entries
    ]
    return MeasurementGroup(title, tuple(rows))
