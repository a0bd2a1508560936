"""Probes: each changes what must not matter, and compares outputs. `PROBES` has them in the report's order,
`OF_MODELS` those that need a model alone."""

from __future__ import annotations

from .._probe import Probe
from . import _agreement, _batch, _cache, _causality, _determinism, _packing, _positions, _reach, _source, _training

PROBES: tuple[Probe, ...] = (
    _determinism.PROBE,
    _causality.PROBE,
    _batch.PROBE,
    _packing.PROBE,
    _cache.PROBE,
    _source.PROBE,
    _reach.PROBE,
    _positions.PROBE,
    _agreement.PROBE,
    _training.PROBE,
)
OF_MODELS: tuple[Probe, ...] = (
    _determinism.PROBE,
    _causality.PROBE,
    _reach.PROBE,
    _batch.PROBE,
    _cache.PROBE,
    _source.PROBE,
    _positions.PROBE,
)
