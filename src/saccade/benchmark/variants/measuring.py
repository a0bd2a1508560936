"""A comparison from start to end: weigh everyone, check and hold against exact attention, time in turns.

Shape legend: B batch, Hq / Hkv heads, L tokens, R rows that are compared, D key width, Dv value width.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..attention.timing import Budget, Clock, Stopwatch, first_line, quiet, repeat_noisy, take_turns, thread_count
from .contenders import ContenderRunner, Decoding, VariantContender
from .data import ComparisonData
from .results import READING, ApproximationError, ContenderResults, LengthResult, VariantComparison
from .weighing import CallWeight, WeighingLimits, weigh

Told = Callable[[str], None]
ROWS = 256  # of a long problem that are held against exact attention
ALL_ROWS = 2048  # tokens up to which all of them are
WRONG_STEP = 1e-3  # of the last row's norm: far above rounding, far below what a mistake gives
WRONG_EXACT = 1e-4  # likewise, of exact attention itself
WARM = 0.2  # seconds; a first call that took longer needs no more warming up
SIDE_BY_SIDE = 2  # processes that weigh at a time


@dataclass(frozen=True)
class ComparisonSettings:
    """How a comparison is made."""

    threads: int
    budget: Budget = field(default_factory=lambda: Budget(2.0, 3, 100))
    limits: WeighingLimits = field(default_factory=WeighingLimits)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


@dataclass
class _CheckedContender:
    """A contender at one length that was found right."""

    contender: VariantContender
    runner: ContenderRunner
    point: LengthResult
    decoding: Decoding | None


def measure(
    comparison: VariantComparison,
    who: Sequence[VariantContender],
    data: ComparisonData,
    lengths: Sequence[int],
    settings: ComparisonSettings,
    progress: Told,
    clock: Clock = time.perf_counter,
) -> None:
    """Put a line of everyone into the comparison, and fill them length after length.

    told: is called with what was done, len(who) + len(lengths) times.
    """
    sizes = data.sizes
    longest = sizes._replace(length=max(lengths))
    for one in who:
        line = ContenderResults(one.name, one.kind, one.computes, one.setting(max(lengths)), one.whole)
        comparison.lines.append(replace(line, refused=one.refusal(longest)))
    taking = [one for one, line in zip(who, comparison.lines, strict=True) if not line.refused]
    for _ in range(len(who) - len(taking)):
        progress("")
    weighed = _weighed_all(taking, data, lengths, settings, progress)
    with thread_count(settings.threads):
        for length in sorted(lengths):
            weights = {name: found[length] for name, found in weighed.items()}
            points = _points_at(length, taking, weights, data, settings, clock)
            comparison.lines = [
                replace(line, points=(*line.points, points[line.name])) if line.name in points else line
                for line in comparison.lines
            ]
            progress(f"{length} tokens")


def _weighed_all(
    who: Sequence[VariantContender],
    data: ComparisonData,
    lengths: Sequence[int],
    settings: ComparisonSettings,
    progress: Told,
) -> dict[str, dict[int, CallWeight]]:
    def some(part: Sequence[VariantContender]) -> dict[str, dict[int, CallWeight]]:
        return weigh(part, data.sizes, lengths, settings.limits, settings.threads, settings.seed, progress, stop)

    stop = threading.Event()
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            parts = list(pool.map(some, [who[first::SIDE_BY_SIDE] for first in range(SIDE_BY_SIDE)]))
        except KeyboardInterrupt:
            stop.set()  # the pool waits for its threads, and they ask no more
            raise
    return {name: weights for part in parts for name, weights in part.items()}


def _points_at(
    length: int,
    who: Sequence[VariantContender],
    weighed: dict[str, CallWeight],
    data: ComparisonData,
    settings: ComparisonSettings,
    clock: Clock,
) -> dict[str, LengthResult]:
    """Everyone's point at one length."""
    points: dict[str, LengthResult] = {}
    running = []
    judge = OutputJudge(data, length, settings.seed)
    for one in who:
        weight = weighed[one.name]
        point = LengthResult(length, memory=weight.peak, note=weight.left_out)
        made = _prepared(one, point, judge) if not point.note else None
        if isinstance(made, _CheckedContender):
            running.append(made)
        points[one.name] = point if made is None else made.point if isinstance(made, _CheckedContender) else made
    timed = _timed(running, settings.budget, clock)
    points.update({one.contender.name: replace(one.point, readings=timed[one.contender.name]) for one in running})
    return points


def _prepared(contender: VariantContender, point: LengthResult, judge: OutputJudge) -> _CheckedContender | LengthResult:
    """What is ready to be timed, or the point that says why it is not."""
    try:
        runner = contender.build(judge.sizes, judge.tensors, judge.seed)
        point = replace(point, parameters=runner.parameters)
        with torch.no_grad():
            out = runner.forward()
            wrong = judge.faults(contender, runner, out)
            if wrong:
                return replace(point, note=wrong)
            point = replace(point, error=judge.error(contender, runner, out))
            if isinstance(runner.decoding, str):
                return _CheckedContender(contender, runner, replace(point, no_decode=runner.decoding), None)
            decoding = runner.decoding()
            off = distance(decoding.step()[..., -1:, :], out[..., -1:, :])
    except Exception as error:  # whatever a contender raises is its own answer; the others still run
        return replace(point, note=first_line(error))
    if not off.worst <= WRONG_STEP:
        return replace(point, note=f"WRONG: a decoding step is off by {off.worst:.2g} of the parallel form")
    return _CheckedContender(contender, runner, replace(point, kept=decoding.kept), decoding)


class OutputJudge:
    """What is right at a length: shapes, finite numbers, and exact attention in float64 where the data is real."""

    def __init__(self, data: ComparisonData, length: int, seed: int):
        self.sizes, self.seed = data.sizes._replace(length=length), seed
        self.tensors = data.at(length, seed)
        self.rows = torch.arange(length)
        if length > ALL_ROWS:
            self.rows = torch.linspace(0, length - 1, ROWS, dtype=torch.float64).round().long().unique()
        self._exact = exact_rows(*self.tensors, self.rows, causal=self.sizes.causal) if data.real(length) else None

    def faults(self, contender: VariantContender, runner: ContenderRunner, out: Tensor) -> str:
        """What makes a result wrong; empty where nothing does."""
        if not out.isfinite().all():
            return "WRONG: the result has NaN or infinity"
        batch, heads, _, _, width, length, _ = self.sizes
        expected = (batch, length, self.sizes.width)
        if contender.kind == READING:
            expected = tuple(runner.aligned(out.new_zeros(1).expand(batch, heads, length, width)).shape)  # type: ignore[assignment]
        if tuple(out.shape) != expected:
            return f"WRONG: the result has shape {tuple(out.shape)}, expected {expected}"
        error = self.error(contender, runner, out)
        if contender.whole and error is not None and not error.whole <= WRONG_EXACT:
            return f"WRONG: exact attention is off by {error.whole:.2g}"
        return ""

    def error(self, contender: VariantContender, runner: ContenderRunner, out: Tensor) -> ApproximationError | None:
        if self._exact is None or contender.kind != READING:
            return None
        return distance(out[:, :, self.rows], runner.aligned(self._exact))


def distance(tensor: Tensor, right: Tensor) -> ApproximationError:
    """How far rows (..., R, Dv) are off, in the L2 norm, relative to what is right; NaN counts as infinity."""
    tensor, right = tensor.detach().double(), right.detach().double()
    off, norm = (tensor - right).norm(dim=-1), right.norm(dim=-1)
    whole = float(off.norm() / norm.norm()) if float(norm.norm()) > 0 else float(off.norm())
    worst = float((off / norm.clamp(min=torch.finfo(torch.float32).tiny)).max())
    return ApproximationError(*(math.inf if math.isnan(number) else number for number in (whole, worst)))


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, causal: bool) -> Tensor:
    """Rows (B, Hq, R, Dv) of softmax attention, written out in float64, head by head."""
    out = query.new_empty(*query.shape[:2], len(rows), value.shape[3], dtype=torch.float64)
    hidden = torch.arange(key.shape[2]) > rows[:, None]
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        keys, values = key[:, head // group].double(), value[:, head // group].double()
        logits = query[:, head, rows].double() @ keys.mT * query.shape[3] ** -0.5
        if causal:
            logits = logits.masked_fill(hidden, -math.inf)
        out[:, head] = logits.softmax(-1) @ values
    return out


def _timed(
    running: Sequence[_CheckedContender], budget: Budget, clock: Clock
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Readings by name and call; everyone takes turns at one kind of call, then at the next.

    What is noisy then is read once more.
    """
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "training": {}, "decode": {}}
    for one in running:
        calls["forward"][one.contender.name] = _resting(one.runner.forward)
        calls["training"][one.contender.name] = one.runner.training()
        if one.decoding is not None:
            calls["decode"][one.contender.name] = _resting(one.decoding.step)
    found: dict[str, dict[str, tuple[float, ...]]] = {one.contender.name: {} for one in running}
    with quiet():
        for call, made in calls.items():
            watches = {name: Stopwatch(function, clock=clock) for name, function in made.items()}
            for watch in watches.values():
                if watch() < WARM:
                    watch.prepare(budget.block)
            meters = list(watches.values())
            readings = repeat_noisy(meters, take_turns(meters, budget, clock), budget, clock) if meters else []
            for name, seconds in zip(watches, readings, strict=True):
                found[name][call] = tuple(seconds)
    return found


def _resting(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run
