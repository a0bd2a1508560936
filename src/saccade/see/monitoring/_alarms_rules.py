"""The rules of the alarms: plain functions of a reading, of the heads' history, and of the thresholds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ._alarms_reading import CallReading, NonFiniteEntry, Numbers
from ._alarms_thresholds import Thresholds

SMOOTHING = 0.5  # weight of the newest reading in a head's running mean


@dataclass
class HeadHistory:
    """The history of one head of one call site: numbers that later readings are compared with."""

    evenness: float = math.nan
    logit: float = math.nan
    highest_evenness: float = -math.inf
    lowest_logit: float = math.inf

    def note(self, evenness: float, logit: float) -> None:
        if math.isfinite(evenness):
            self.evenness = _smoothed(self.evenness, evenness)
            self.highest_evenness = max(self.highest_evenness, self.evenness)
        if math.isfinite(logit):
            self.logit = _smoothed(self.logit, logit)
            self.lowest_logit = min(self.lowest_logit, self.logit)


def _smoothed(before: float, now: float) -> float:
    return now if math.isnan(before) else before + SMOOTHING * (now - before)


@dataclass(frozen=True)
class RuleMatch:
    """A rule that holds for a head (None: for the whole call), and the reason."""

    kind: str
    severity: str
    head: int | None
    message: str
    numbers: dict[str, float]
    limits: dict[str, float]


Rule = Callable[[CallReading, Sequence[HeadHistory], Thresholds], Iterator[RuleMatch]]


def not_finite(place: NonFiniteEntry) -> RuleMatch:
    """The place at which NaN or an infinity was first found."""
    entry = "" if place.at is None else f", first at item {place.item}, {_axes(place)}"
    head = f"key-value head {place.head}" if place.what in ("key", "value") else f"head {place.head}"
    message = f"{place.what} of {head} is not finite{entry}"
    return RuleMatch(NOT_FINITE, "error", place.head, message, {"share": place.share}, {})


def _axes(place: NonFiniteEntry) -> str:
    assert place.at is not None
    first = "key" if place.what in ("key", "value") else "row"
    second = "key" if place.what == "logits" else "channel"
    return f"{first} {place.at[0]}, {second} {place.at[1]}"


def entropy_collapse(reading: CallReading, past: Sequence[HeadHistory], limits: Thresholds) -> Iterator[RuleMatch]:
    """The layer's mean entropy has collapsed from a higher value; reports the heads with low entropy."""
    heads = [head for head in range(reading.heads) if not math.isnan(reading.evenness[head])]
    if not heads:
        return
    mean = statistics.fmean(reading.evenness[head] for head in heads)
    before = statistics.fmean(past[head].highest_evenness for head in heads)
    collapsed = mean <= min(limits.evenness, limits.fallen * before)
    if not (collapsed and statistics.median(reading.logit[head] for head in heads) >= limits.learned):
        return
    for head, (evenness, own) in enumerate(zip(reading.evenness, past, strict=True)):
        if evenness <= limits.evenness:
            numbers = {"evenness": evenness, "highest_evenness": own.highest_evenness, "layer_evenness": mean}
            numbers["logit"] = reading.logit[head]
            yield RuleMatch(
                ENTROPY_COLLAPSE,
                "warning",
                head,
                f"entropy fell from {own.highest_evenness:.2g} to {evenness:.2g} of the maximum, the layer's mean from "
                f"{before:.2g} to {mean:.2g}; the largest logit is {reading.logit[head]:.3g}",
                numbers,
                _of(limits, "evenness", "fallen", "learned"),
            )


def saturated_softmax(reading: CallReading, past: Sequence[HeadHistory], limits: Thresholds) -> Iterator[RuleMatch]:
    """Most heads of the layer put nearly all weight on one key in most rows, with large logits."""
    pairs = list(zip(reading.sharp, reading.logit, strict=True))
    allowed = [limits.wide if own.highest_evenness < limits.even else limits.learned for own in past]
    heads = [h for h, (sharp, logit) in enumerate(pairs) if sharp >= limits.sharp_rows and logit >= allowed[h]]
    if len(heads) < max(1, limits.majority * reading.heads):
        return
    for head in heads:
        sharp, logit = pairs[head]
        yield RuleMatch(
            SATURATED,
            "warning",
            head,
            f"{sharp:.0%} of the rows give at least {limits.sharp:g} of their weight to one key, with logits up to "
            f"{logit:.3g}; {len(heads)} of the layer's {reading.heads} heads are like that",
            {"sharp_rows": sharp, "logit": logit, "heads": float(len(heads))},
            {"sharp_rows": limits.sharp_rows, "logit": allowed[head], "majority": limits.majority},
        )


def logit_growth(reading: CallReading, past: Sequence[HeadHistory], limits: Thresholds) -> Iterator[RuleMatch]:
    """The largest logit has grown far above its lowest value, or to a value at which runs diverge."""
    for head, (logit, own) in enumerate(zip(reading.logit, past, strict=True)):
        grown = logit >= limits.logit and logit >= limits.grown * own.lowest_logit
        if grown or logit >= limits.diverging:
            yield RuleMatch(
                LOGIT_GROWTH,
                "error" if logit >= limits.diverging else "warning",
                head,
                f"the largest logit is {logit:.4g}" + (f", and was as low as {own.lowest_logit:.3g}" if grown else ""),
                {"logit": logit, "lowest_logit": own.lowest_logit},
                _of(limits, "logit", "grown", "diverging"),
            )


def uniform_head(reading: CallReading, past: Sequence[HeadHistory], limits: Thresholds) -> Iterator[RuleMatch]:
    """A head has equal weights on all keys while others of its layer do not, or its logits are all equal."""
    lowest = min((evenness for evenness in reading.evenness if not math.isnan(evenness)), default=math.nan)
    for head, (evenness, span) in enumerate(zip(reading.evenness, reading.span, strict=True)):
        flat = span <= limits.flat
        if evenness >= limits.uniform and (lowest <= limits.formed or flat):
            why = f"while another head of this layer is at {lowest:.2g}"
            if flat:
                why = (
                    "because its logits are equal" if span == 0 else f"because its logits differ by at most {span:.2g}"
                )
            yield RuleMatch(
                UNIFORM,
                "warning",
                head,
                f"its weights are uniform (entropy is {evenness:.4f} of the maximum), {why}",
                {"evenness": evenness, "span": span, "lowest_evenness": lowest},
                _of(limits, "uniform", "formed", "flat"),
            )


def dead_head(reading: CallReading, past: Sequence[HeadHistory], limits: Thresholds) -> Iterator[RuleMatch]:
    """A head that always attends to the same key, or to none, or whose output is near zero."""
    loudest = max((norm for norm in reading.out if not math.isnan(norm)), default=math.nan)
    for head, (place, weight) in enumerate(_strongest_place(reading)):
        numbers = {"weight": weight, "out": reading.out[head], "largest_out": loudest}
        if weight >= limits.dead:
            message = f"{weight:.4f} of the weight is on {place} in every row"
        elif reading.out[head] <= limits.silent * loudest:
            message = f"its output has norm {reading.out[head]:.2g}, that of the layer's strongest head {loudest:.2g}"
        else:
            continue
        yield RuleMatch(DEAD, "warning", head, message, numbers, _of(limits, "dead", "silent"))


def sink(reading: CallReading, past: Sequence[HeadHistory], limits: Thresholds) -> Iterator[RuleMatch]:
    """Most attention goes to one key in all rows, but not all of it: that would be a dead head."""
    for head, (place, weight) in enumerate(_strongest_place(reading)):
        if limits.sink <= weight < limits.dead:
            message = f"{weight:.2f} of the weight is on {place}, whatever the row"
            yield RuleMatch(SINK, "note", head, message, {"weight": weight}, _of(limits, "sink"))


def _of(limits: Thresholds, *names: str) -> dict[str, float]:
    return {name: getattr(limits, name) for name in names}


def _strongest_place(reading: CallReading) -> Iterator[tuple[str, float]]:
    """For each head the place with the largest weight in all rows, and that weight."""
    for first, absent, steady, at in zip(reading.first, reading.absent, reading.steady, reading.steady_at, strict=True):
        places = [(first, "the first key"), (absent, "the learned sink"), (steady, f"key {at:.0f}")]
        weight, name = max(places, key=lambda place: place[0])
        yield name, weight


def vanishing_gradients(
    reading: CallReading, gradients: dict[str, Numbers], past: Sequence[HeadHistory], limits: Thresholds
) -> Iterator[RuleMatch]:
    """The gradients of queries and keys are tiny compared with that of the output.

    With dL/ds_ij = p_ij (do_i.v_j - o_i.do_i), dL/dq_i = scale sum_j dL/ds_ij k_j is at most of the order of
    scale |k| |v| |do|. The gain,

        gain_q = sqrt(n) |dq| |q| / (L |v| |do|),    gain_k = sqrt(n) |dk| |k| / (L |v| |do|),

    with L the largest logit, of the order of scale |q| |k|, and n the keys a row sees, does not change with the scale
    of the loss, of the logits or of the values. It is near 1 / sqrt(D) for equal weights (n terms of 1 / n each,
    of random sign), and goes to 0 as weights become one-hot.
    """
    for head in range(reading.heads):
        size = reading.logit[head] * reading.value[head] * gradients["out"][head] / math.sqrt(reading.keys[head])
        if not (size > 0 and math.isfinite(size)):
            continue
        query = gradients["query"][head] * reading.query[head] / size
        key = gradients["key"][head] * reading.key[head] / size
        if max(query, key) <= limits.gain:
            yield RuleMatch(
                VANISHING,
                "warning",
                head,
                f"almost no gradient passes through the softmax: norm {gradients['out'][head]:.2g} at the output, "
                f"{gradients['query'][head]:.2g} at the queries and {gradients['key'][head]:.2g} at the keys "
                f"(gains of {query:.1g} and {key:.1g})",
                {"gain_query": query, "gain_key": key, **{f"gradient_{n}": g[head] for n, g in gradients.items()}},
                _of(limits, "gain"),
            )


ENTROPY_COLLAPSE = "entropy collapse"
SATURATED = "saturated softmax"
LOGIT_GROWTH = "logit growth"
UNIFORM = "uniform head"
DEAD = "dead head"
SINK = "sink"
VANISHING = "vanishing gradients"
NOT_FINITE = "not finite"

RULES: tuple[Rule, ...] = (entropy_collapse, saturated_softmax, logit_growth, uniform_head, dead_head, sink)

ADVICE = {
    ENTROPY_COLLAPSE: "lower the learning rate or lengthen the warm-up; normalise queries and keys (qk_norm); clip "
    "gradients; return to an earlier checkpoint",
    SATURATED: "check that the scale is D^-0.5 and applied once; normalise queries and keys (qk_norm), or cap the "
    "logits (softcap)",
    LOGIT_GROWTH: "normalise queries and keys (qk_norm), cap the logits (softcap), or lower the learning rate of the "
    "query and key projections",
    UNIFORM: "look at the norms of this head's queries and keys and whether its projections get a gradient; a mask or "
    "a bias of the wrong shape has the same effect",
    DEAD: "check whether the head is active on other inputs; if not, prune it or, in training, initialise its "
    "projections again",
    SINK: "this is normal: a head that finds nothing to attend to puts its weight there; keep that key in any cache "
    "that evicts keys, and exclude it from averages over keys",
    VANISHING: "the weights are one-hot or the values similar: normalise queries and keys (qk_norm) or cap the logits "
    "(softcap); with float16 look at the loss scale",
    NOT_FINITE: "the numbers were finite in all calls seen before this one: look at what this module reads; lower the "
    "learning rate, and in float16 look for values above 65,504",
}
