"""Makes a comparison: measures memory, checks results against exact attention, and times contenders alternately.

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
from .contenders import ContenderRunner, DecodingRun, VariantContender
from .data import ComparisonData
from .results import READING, ApproximationError, ContenderResults, LengthResult, VariantComparison
from .weighing import CallWeight, WeighingLimits, weigh

Told = Callable[[str], None]
ROWS = 256  # rows of long problems compared with exact attention
ALL_ROWS = 2048  # up to this number of tokens all rows are compared
WRONG_STEP = 1e-3  # relative to the last row's norm: far above rounding errors
WRONG_EXACT = 1e-4  # the same for exact attention
WARM = 0.2  # seconds; longer first calls need no more warm-up
SIDE_BY_SIDE = 2  # processes that measure memory in parallel


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a comparison."""

    threads: int
    budget: Budget = field(default_factory=lambda: Budget(2.0, 3, 100))
    limits: WeighingLimits = field(default_factory=WeighingLimits)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


@dataclass
class _CheckedContender:
    """A contender at one length with a correct result."""

    contender: VariantContender
    runner: ContenderRunner
    point: LengthResult
    decoding: DecodingRun | None


def measure(
    comparison: VariantComparison,
    who: Sequence[VariantContender],
    data: ComparisonData,
    lengths: Sequence[int],
    settings: ComparisonSettings,
    progress: Told,
    clock: Clock = time.perf_counter,
) -> None:
    """Add a line for each contender to the comparison, and fill them length by length.

    progress: called with each finished piece of work, len(who) + len(lengths) times.
    """
    sizes = data.sizes
    longest = sizes._replace(length=max(lengths))
    for contender in who:
        line = ContenderResults(
            contender.name, contender.kind, contender.computes, contender.setting(max(lengths)), contender.whole
        )
        comparison.lines.append(replace(line, refused=contender.refusal(longest)))
    taking = [contender for contender, line in zip(who, comparison.lines, strict=True) if not line.refused]
    for _ in range(len(who) - len(taking)):
        progress("")
    weighed = _weighed_all(taking, data, lengths, settings, progress)
    with thread_count(settings.threads):
        for length in sorted(lengths):
            weights = {name: by_length[length] for name, by_length in weighed.items()}
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
            stop.set()  # the pool waits for its threads, which stop at the next piece of work
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
    """The result of each contender at one length."""
    points: dict[str, LengthResult] = {}
    running = []
    judge = OutputJudge(data, length, settings.seed)
    for runner in who:
        weight = weighed[runner.name]
        point = LengthResult(length, memory=weight.peak, note=weight.left_out)
        made = _prepared(runner, point, judge) if not point.note else None
        if isinstance(made, _CheckedContender):
            running.append(made)
        points[runner.name] = point if made is None else made.point if isinstance(made, _CheckedContender) else made
    timed = _timed(running, settings.budget, clock)
    points.update(
        {runner.contender.name: replace(runner.point, readings=timed[runner.contender.name]) for runner in running}
    )
    return points


def _prepared(contender: VariantContender, point: LengthResult, judge: OutputJudge) -> _CheckedContender | LengthResult:
    """The contender ready for timing, or its result with the reason why it is not timed."""
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
    except Exception as error:  # an exception of a contender becomes its note; the others still run
        return replace(point, note=first_line(error))
    if not off.worst <= WRONG_STEP:
        return replace(point, note=f"WRONG: a decoding step is off by {off.worst:.2g} of the parallel form")
    return _CheckedContender(contender, runner, replace(point, kept=decoding.kept), decoding)


class OutputJudge:
    """Checks results at a length: shapes, finite numbers, and, for given data, exact attention in float64."""

    def __init__(self, data: ComparisonData, length: int, seed: int):
        self.sizes, self.seed = data.sizes._replace(length=length), seed
        self.tensors = data.at(length, seed)
        self.rows = torch.arange(length)
        if length > ALL_ROWS:
            self.rows = torch.linspace(0, length - 1, ROWS, dtype=torch.float64).round().long().unique()
        self._exact = exact_rows(*self.tensors, self.rows, causal=self.sizes.causal) if data.real(length) else None

    def faults(self, contender: VariantContender, runner: ContenderRunner, out: Tensor) -> str:
        """The fault of a result as text; "" for a correct one."""
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
    """Relative error of rows (..., R, Dv) in the L2 norm; NaN counts as infinity."""
    tensor, right = tensor.detach().double(), right.detach().double()
    off, norm = (tensor - right).norm(dim=-1), right.norm(dim=-1)
    whole = float(off.norm() / norm.norm()) if float(norm.norm()) > 0 else float(off.norm())
    worst = float((off / norm.clamp(min=torch.finfo(torch.float32).tiny)).max())
    return ApproximationError(*(math.inf if math.isnan(number) else number for number in (whole, worst)))


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, *, causal: bool) -> Tensor:
    """Rows (B, Hq, R, Dv) of softmax attention in float64, computed head by head."""
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
    """Readings by contender and kind of call, timed alternately for each kind.

    Noisy readings are repeated once.
    """
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "training": {}, "decode": {}}
    for runner in running:
        calls["forward"][runner.contender.name] = _resting(runner.runner.forward)
        calls["training"][runner.contender.name] = runner.runner.training()
        if runner.decoding is not None:
            calls["decode"][runner.contender.name] = _resting(runner.decoding.step)
    times: dict[str, dict[str, tuple[float, ...]]] = {runner.contender.name: {} for runner in running}
    with quiet():
        for call, made in calls.items():
            watches = {name: Stopwatch(function, clock=clock) for name, function in made.items()}
            for watch in watches.values():
                if watch() < WARM:
                    watch.prepare(budget.block)
            meters = list(watches.values())
            readings = repeat_noisy(meters, take_turns(meters, budget, clock), budget, clock) if meters else []
            for name, seconds in zip(watches, readings, strict=True):
                times[name][call] = tuple(seconds)
    return times


def _resting(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return call()

    return run
