"""Sentences about what was measured of heads."""

from __future__ import annotations

from collections.abc import Sequence

from ..._numbers import percent
from ...attribution import Head, HeadImportance, HeadMap, Patching
from ._numbers import decimals

NOTHING = 0.1  # of what the head does that does most
NAMED = 5  # heads that are named as those that are needed most, and least


def rises(found: HeadImportance) -> HeadMap:
    """What the loss rises by without each head; of a gradient to first order."""
    if found.signed is None:
        return found.values
    return HeadMap(found.signed.calls, -found.signed.values)


def importance_sentences(found: HeadImportance) -> list[str]:
    """The five heads that matter most, those that matter least, and in which order heads were removed."""
    by_head = dict(zip(found.heads, rises(found).values.tolist(), strict=True))
    name, digits = found.values.named, decimals(max(map(abs, by_head.values())))

    def listed(heads: Sequence[Head]) -> str:
        return _joined([f"{name(head)} ({by_head[head]:+.{digits}f})" for head in heads])

    if found.removed:
        return _removals(found)
    falling = sorted(found.heads, key=lambda head: -by_head[head])
    helpful = [head for head in falling if by_head[head] > 0][:NAMED]
    harmful = [head for head in reversed(falling) if by_head[head] < 0]
    most = max(map(abs, by_head.values()))
    least = sorted((head for head in falling if abs(by_head[head]) <= NOTHING * most), key=lambda h: abs(by_head[h]))
    out = []
    if helpful:
        moved = f"{'would rise' if found.by == 'gradient' else 'rises'} by {by_head[helpful[0]]:.{digits}f} nats"
        moved += " (first-order estimate)" if found.by == "gradient" else ""
        out.append(f"Head {name(helpful[0])} matters most: without it the loss {moved}.")
    if len(helpful) > 1:
        out.append(f"Next are {listed(helpful[1:])}.")
    if harmful:
        falls = "would fall" if found.by == "gradient" else "falls"
        out.append(
            f"For {len(harmful)} of the {len(falling)} heads the loss {falls} without the head, most without "
            f"{listed(harmful[:3])}."
        )
    if least:
        out.append(f"Hardly any effect: {listed(least[:NAMED])}.")
    return out


def _removals(found: HeadImportance) -> list[str]:
    steps = ", ".join(f"{found.values.named(step.head)} ({step.loss:.3f})" for step in found.removed)
    out = [f"Removed in this order, with the loss after each: {steps}."]
    best = min(found.removed, key=lambda step: step.loss)
    count = found.removed.index(best) + 1
    if best.loss < found.loss:
        out.append(
            f"The loss is lowest, {best.loss:.3f}, without the first {count}; with all heads it is {found.loss:.3f}."
        )
    last = found.removed[-1]
    left = len(found.heads) - len(found.removed)
    out.append(f"With only the remaining {left} heads the loss is {last.loss:.3f}: these heads matter most.")
    return out


def patching_sentences(found: Patching) -> list[str]:
    """Which heads bring how much of the metric back, which work against it, and how well both ways agree."""
    ranked = [(head, effect) for head, effect in found.ranked()[:NAMED] if effect]
    if not ranked:
        return [
            "No head changes the metric: its patched output is the same in both runs, or does not affect the metric."
        ]
    metrics = found.metrics("exact" if found.exact is not None else "gradient")
    value = dict(zip(metrics.heads, metrics.values.tolist(), strict=True))
    head, effect = ranked[0]
    name = found.effects.named
    about = "" if found.exact is not None else " (first-order estimate)"
    out = [
        f"Head {name(head)} restores most: with its output from the clean run, the corrupted run's metric goes from "
        f"{found.corrupted:+.2f} to {value[head]:+.2f}{about}, {_share(effect)} of the way to the clean run's."
    ]
    if len(ranked) > 1:
        out.append(f"Next are {_joined([f'{name(head)} ({_share(effect)})' for head, effect in ranked[1:]])}.")
    if found.agreement is not None:
        out.append(f"Gradient estimates compared with exact values: {found.agreement}.")
    return out


def _share(effect: float) -> str:
    return percent(effect) if effect >= 0 else f"-{percent(-effect)}"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([*filter(None, [", ".join(parts[:-1])]), *parts[-1:]])
