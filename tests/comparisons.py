"""Comparisons made of numbers, not measured."""

from __future__ import annotations

from saccade.benchmark.variants import (
    ApproximationError,
    ContenderResults,
    GradientReach,
    LengthResult,
    VariantComparison,
)

MACHINE = {
    "processor": "Abacus",
    "cores": 3,
    "threads": 2,
    "last_level_cache": 2**21,
    "instruction_set": "avx2",
    "torch": "2.0",
    "saccade": "0.1",
    "date": "2026-01-02T03:04:05",
    "load_before": 0.1,
}
DATA = {
    "source": "beads",
    "note": "",
    "unlimited": False,
    "batch": 1,
    "heads": 4,
    "kv_heads": 2,
    "head": 16,
    "value_head": 16,
    "length": 512,
    "causal": True,
}


def point(length, training, *, error=None, forward=None, decode=None, memory=None, spread=1.0, **more):
    """Medians are the numbers given; the other readings are `spread` times as much, and as little."""
    told = {"forward": forward, "training": training, "decode": decode}
    readings = {call: (n / spread, n, spread * n) for call, n in told.items() if n is not None}
    found = None if error is None else ApproximationError(error, 2 * error)
    return LengthResult(length, readings, memory, error=found, **more)


def line(name, seconds, *, error=None, known=512, kind="reading", computes="approximation", whole=False, **more):
    """seconds: of training, by length; error: at the length `known`."""
    points = tuple(point(n, s, error=error if n == known else None) for n, s in seconds.items())
    return ContenderResults(name, kind, computes, "", whole, points, **more)


def exact(seconds, **more):
    return line("exact", seconds, error=1e-7, computes="softmax", whole=True, **more)


def comparison(*lines, tolerance=0.1, paths=(), **data):
    return VariantComparison(dict(MACHINE), {"tolerance": tolerance}, {**DATA, **data}, list(lines), list(paths))


def full():
    """One of everything."""
    path = GradientReach("exact", 1, (1, 2, 4), (1.0, 0.5, 0.0))
    some = ContenderResults(
        "some",
        "reading",
        "approximation",
        "rank=3",
        points=(
            point(512, 0.5, forward=0.25, decode=1e-4, memory=3 * 2**20, error=0.06, kept=2**10, parameters=7),
            LengthResult(1024, note="would form about 9.0 GiB"),
        ),
    )
    other = ContenderResults(
        "other", "reading", "other", "", points=(point(512, 0.1, error=4.0, no_decode="it has no past"),)
    )
    refused = ContenderResults("late", "reading", "approximation", "", refused="cannot be causal: it mixes all tokens")
    layers = [line("attention", {512: 2.0, 1024: 8.0}, kind="layer", whole=True), line("GRU", {512: 1.0}, kind="layer")]
    return comparison(exact({512: 1.0, 1024: 4.0}), some, other, refused, *layers, paths=[path])
