"""Sentences about what was measured of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ....support._numbers import DOT, counted, decimals_for, joined, percent, signed_cell, without_zero
from ...attribution import Head, HeadImportance, HeadValues, Patching
from ...attribution._heads import by_sign

NOTHING = 0.1  # of what the head does that does most
NAMED = 5  # heads that are named as those that are needed most, and least


def rises(found: HeadImportance) -> HeadValues:
    """What the loss rises by without each head; of a gradient to first order."""
    if found.signed is None:
        return found.values
    return HeadValues(found.signed.calls, -found.signed.values)


def _rise_intervals(found: HeadImportance) -> dict[Head, tuple[float, float]]:
    """The 95 % interval of what the loss rises by without each head; empty where nothing gives one."""
    low, high, sign = found.low, found.high, 1
    if found.signed is not None:
        low, high, sign = found.signed_high, found.signed_low, -1
    if low is None or high is None:
        return {}
    ends = (sign * low.values).tolist(), (sign * high.values).tolist()
    return dict(zip(found.heads, zip(*ends, strict=True), strict=True))


def legend(values: Iterable[float], digits: int) -> str:
    """What the dot stands for, where one of these numbers has it; else nothing."""
    least = without_zero(f"{0.5 * 10**-digits:.{digits + 1}f}")
    return f"{DOT} is 0, to within {least}" if any(signed_cell(value, digits) == DOT for value in values) else ""


def importance_sentences(found: HeadImportance) -> list[str]:
    """The five heads that matter most, those that certainly harm, of which heads the sign is open, those that matter
    least, and in which order heads were removed."""
    if found.removed:
        return _removals(found)
    by_head = dict(zip(found.heads, rises(found).values.tolist(), strict=True))
    name, digits = found.values.named, decimals_for(max(map(abs, by_head.values())))
    ends = _rise_intervals(found)

    def listed(heads: Sequence[Head]) -> str:
        return joined([f"{name(head)} ({by_head[head]:+.{digits}f})" for head in heads])

    falling = sorted(found.heads, key=lambda head: -by_head[head])
    helpful = [head for head in falling if by_head[head] > 0][:NAMED]
    most = max(map(abs, by_head.values()))
    least = sorted((head for head in falling if abs(by_head[head]) <= NOTHING * most), key=lambda h: abs(by_head[h]))
    out = []
    if helpful:
        moved = f"{'would rise' if found.by == 'gradient' else 'rises'} by {by_head[helpful[0]]:.{digits}f} nats"
        notes = ["first-order estimate"] if found.by == "gradient" else []
        notes += [_interval(*ends[helpful[0]], digits)] if ends else []
        out.append(f"Head {name(helpful[0])} matters most: without it the loss {moved}{_noted(notes)}.")
    if len(helpful) > 1:
        out.append(f"Next are {listed(helpful[1:])}.")
    out += _harmful(found, [head for head in reversed(falling) if by_head[head] < 0], ends, listed)
    if least:
        out.append(f"Hardly any effect: {listed(least[:NAMED])}.")
    return out


def _harmful(
    found: HeadImportance,
    below: Sequence[Head],
    ends: dict[Head, tuple[float, float]],
    listed: Callable[[Sequence[Head]], str],
) -> list[str]:
    """Which heads the loss falls without: those whose interval is below 0, and how many have 0 in it."""
    falls, count = "would fall" if found.by == "gradient" else "falls", len(found.heads)
    if not ends:
        said = f"For {len(below)} of the {count} heads the loss {falls} without the head"
        return [f"{said}; how certain that is, a longer text shows."] if below else []
    certain = [head for head in below if ends[head][1] < 0]
    open_ones = sum(low <= 0 <= high for low, high in ends.values())
    out = []
    if certain:
        said = f"For {len(certain)} of the {count} heads the loss {falls} without the head"
        out.append(f"{said}, most without {listed(certain[:3])}; chance alone gives about {round(count / 40)}.")
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


def _removals(found: HeadImportance) -> list[str]:
    steps = ", ".join(f"{found.values.named(step.head)} ({step.loss:.3f})" for step in found.removed)
    out = [f"Removed in this order, with the loss after each: {steps}."]
    best = min(found.removed, key=lambda step: step.loss)
    count = found.removed.index(best) + 1
    if best.loss < found.loss:
        notes = [] if best.low is None or best.high is None else [_interval(best.low, best.high, 3)]
        out.append(
            f"The loss is lowest, {best.loss:.3f}, without the first {count}; with all heads it is {found.loss:.3f}: "
            f"a change of {best.rise:+.3f}{_noted(notes)}."
        )
    last = found.removed[-1]
    left = len(found.heads) - len(found.removed)
    out.append(f"With only the remaining {left} heads the loss is {last.loss:.3f}: these heads matter most.")
    return out


def patching_sentences(found: Patching) -> list[str]:
    """Which heads bring how much of the metric back, which move it the other way, and how well both ways agree."""
    restoring, opposing = by_sign(found.ranked())
    if not restoring and not opposing:
        return [
            "No head changes the metric: its patched output is the same in both runs, or does not affect the metric."
        ]
    about = "" if found.exact is not None else " (first-order estimate)"
    out = [_restored(found, *restoring[0], about) if restoring else f"No head restores any of the metric{about}."]
    if len(restoring) > 1:
        out.append(f"Next are {_shares(found, restoring[1:NAMED])}.")
    if opposing:
        away = "move the metric away from the clean run's" if len(opposing) > 1 else "moves the metric away from it"
        out.append(
            f"{counted(len(opposing), 'head')} oppose{'s' * (len(opposing) == 1)} ({away}), most "
            f"{_shares(found, opposing[:NAMED])}."
        )
    if found.agreement is not None:
        out.append(f"Gradient estimates compared with exact values: {found.agreement}.")
    return out


def _restored(found: Patching, head: Head, effect: float, about: str) -> str:
    metrics = found.metrics("exact" if found.exact is not None else "gradient")
    value = dict(zip(metrics.heads, metrics.values.tolist(), strict=True))[head]
    return (
        f"Head {found.effects.named(head)} restores most: with its output from the clean run, the corrupted run's "
        f"metric goes from {found.corrupted:+.2f} to {value:+.2f}{about}, {_share(effect)} of the way to the clean "
        "run's."
    )


def _shares(found: Patching, heads: Sequence[tuple[Head, float]]) -> str:
    return joined([f"{found.effects.named(head)} ({_share(effect)})" for head, effect in heads])


def _share(effect: float) -> str:
    return percent(effect) if effect >= 0 else f"-{percent(-effect)}"
