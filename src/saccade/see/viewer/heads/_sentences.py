"""Sentences about measurements of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ....support._numbers import DOT, counted, decimals_for, joined, percent, signed_cell, without_zero
from ...attribution import Head, HeadImportance, HeadValues, Patching
from ...attribution._heads import by_sign

NOTHING = 0.1  # share of the largest effect below which a head has hardly any
_ROUNDING = 1e-5  # of the way: the last bits of a token's products depend on how many tokens there are
NAMED = 5  # heads named as most and as least important


def rises(importance: HeadImportance) -> HeadValues:
    """The rise of the loss without each head; from a gradient to first order."""
    if importance.signed is None:
        return importance.values
    return HeadValues(importance.signed.calls, -importance.signed.values)


def _rise_intervals(importance: HeadImportance) -> dict[Head, tuple[float, float]]:
    """The 95 % interval of the rise of the loss without each head; empty if there are no intervals."""
    low, high, sign = importance.low, importance.high, 1
    if importance.signed is not None:
        low, high, sign = importance.signed_high, importance.signed_low, -1
    if low is None or high is None:
        return {}
    ends = (sign * low.values).tolist(), (sign * high.values).tolist()
    return dict(zip(importance.heads, zip(*ends, strict=True), strict=True))


def legend(values: Iterable[float], digits: int) -> str:
    """The sentence that explains the dot, which stands for a number that rounds to 0; "" if none does."""
    least = without_zero(f"{0.5 * 10**-digits:.{digits + 1}f}")
    return f"{DOT} is 0, to within {least}" if any(signed_cell(value, digits) == DOT for value in values) else ""


def importance_sentences(importance: HeadImportance) -> list[str]:
    """Sentences on heads: the most important, the certainly harmful, those of unclear sign, the least important; and
    the order of removal."""
    if importance.removed:
        return _removals(importance)
    by_head = dict(zip(importance.heads, rises(importance).values.tolist(), strict=True))
    name, digits = importance.values.named, decimals_for(max(map(abs, by_head.values())))
    ends = _rise_intervals(importance)

    def listed(heads: Sequence[Head]) -> str:
        return joined([f"{name(head)} ({by_head[head]:+.{digits}f})" for head in heads])

    falling = sorted(importance.heads, key=lambda head: -by_head[head])
    helpful = [head for head in falling if by_head[head] > 0][:NAMED]
    most = max(map(abs, by_head.values()))
    least = sorted((head for head in falling if abs(by_head[head]) <= NOTHING * most), key=lambda h: abs(by_head[h]))
    out = []
    if helpful:
        moved = f"{'would rise' if importance.by == 'gradient' else 'rises'} by {by_head[helpful[0]]:.{digits}f} nats"
        notes = ["first-order estimate"] if importance.by == "gradient" else []
        notes += [_interval(*ends[helpful[0]], digits)] if ends else []
        out.append(f"Head {name(helpful[0])} matters most: without it the loss {moved}{_noted(notes)}.")
    if len(helpful) > 1:
        out.append(f"Next are {listed(helpful[1:])}.")
    out += _harmful(importance, [head for head in reversed(falling) if by_head[head] < 0], ends, listed)
    if least:
        out.append(f"Hardly any effect: {listed(least[:NAMED])}.")
    return out


def _harmful(
    importance: HeadImportance,
    below: Sequence[Head],
    ends: dict[Head, tuple[float, float]],
    listed: Callable[[Sequence[Head]], str],
) -> list[str]:
    """Heads without which the loss falls: those with an interval below 0, and the number with 0 in it."""
    falls, count = "would fall" if importance.by == "gradient" else "falls", len(importance.heads)
    if not ends:
        sentence = f"For {len(below)} of the {count} heads the loss {falls} without the head"
        return [f"{sentence}; how certain that is, a longer text shows."] if below else []
    certain = [head for head in below if ends[head][1] < 0]
    open_ones = sum(low <= 0 <= high for low, high in ends.values())
    out = []
    if certain:
        sentence = f"For {len(certain)} of the {count} heads the loss {falls} without the head"
        out.append(f"{sentence}, most without {listed(certain[:3])}; chance alone gives about {round(count / 40)}.")
    if open_ones:
        out.append(
            f"For {open_ones} of the {count} heads this text does not show whether they help or harm: the 95 % "
            "interval includes 0. A longer text narrows it."
        )
    return out


def _interval(low: float, high: float, digits: int) -> str:
    return f"95 % interval {low:+.{digits}f} to {high:+.{digits}f}"


def _noted(notes: Sequence[str]) -> str:
    return f" ({', '.join(notes)})" if notes else ""


def _removals(importance: HeadImportance) -> list[str]:
    steps = ", ".join(f"{importance.values.named(step.head)} ({step.loss:.3f})" for step in importance.removed)
    out = [f"Removed in this order, with the loss after each: {steps}."]
    best = min(importance.removed, key=lambda step: step.loss)
    count = importance.removed.index(best) + 1
    if best.loss < importance.loss:
        notes = [] if best.low is None or best.high is None else [_interval(best.low, best.high, 3)]
        out.append(
            f"The loss is lowest, {best.loss:.3f}, without the first {count}; "
            f"with all heads it is {importance.loss:.3f}: "
            f"a change of {best.rise:+.3f}{_noted(notes)}."
        )
    last = importance.removed[-1]
    left = len(importance.heads) - len(importance.removed)
    out.append(f"With only the remaining {left} heads the loss is {last.loss:.3f}: these heads matter most.")
    return out


def patching_sentences(patching: Patching) -> list[str]:
    """Heads that restore the metric, heads that move it the other way, and the agreement of both estimates."""
    restoring, opposing = by_sign([(head, effect) for head, effect in patching.ranked() if abs(effect) > _ROUNDING])
    if not restoring and not opposing:
        return [
            "No head changes the metric: its patched output is the same in both runs, or does not affect the metric."
        ]
    about = "" if patching.exact is not None else " (first-order estimate)"
    out = [_restored(patching, *restoring[0], about) if restoring else f"No head restores any of the metric{about}."]
    if len(restoring) > 1:
        out.append(f"Next are {_shares(patching, restoring[1:NAMED])}.")
    if opposing:
        away = "move the metric away from the clean run's" if len(opposing) > 1 else "moves the metric away from it"
        out.append(
            f"{counted(len(opposing), 'head')} oppose{'s' * (len(opposing) == 1)} ({away}), most "
            f"{_shares(patching, opposing[:NAMED])}."
        )
    if patching.agreement is not None:
        out.append(f"Gradient estimates compared with exact values: {patching.agreement}.")
    return out


def _restored(patching: Patching, head: Head, effect: float, about: str) -> str:
    metrics = patching.metrics("exact" if patching.exact is not None else "gradient")
    value = dict(zip(metrics.heads, metrics.values.tolist(), strict=True))[head]
    return (
        f"Head {patching.effects.named(head)} restores most: with its output from the clean run, the corrupted run's "
        f"metric goes from {patching.corrupted:+.2f} to {value:+.2f}{about}, {_share(effect)} of the way to the clean "
        "run's."
    )


def _shares(patching: Patching, heads: Sequence[tuple[Head, float]]) -> str:
    return joined([f"{patching.effects.named(head)} ({_share(effect)})" for head, effect in heads])


def _share(effect: float) -> str:
    return percent(effect) if effect >= 0 else f"-{percent(-effect)}"
