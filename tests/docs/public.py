"""The public packages: what `__all__` lists in one of them is for users. All else may change without notice."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

PUBLIC = (
    "saccade",
    "saccade.nn",
    "saccade.positions",
    "saccade.variants",
    "saccade.variants.feature_maps",
    "saccade.variants.patterns",
    "saccade.batching",
    "saccade.models",
    "saccade.tasks",
    "saccade.training",
    "saccade.inspection",
    "saccade.analysis",
    "saccade.attribution",
    "saccade.intervention",
    "saccade.pruning",
    "saccade.monitoring",
    "saccade.verification",
    "saccade.viewer",
    "saccade.acceleration",
    "saccade.distributed",
    "saccade.integrations.transformers",
    "saccade.integrations.lightning",
    "saccade.integrations.trainer",
)


def names(package: str) -> list[str]:
    return list(importlib.import_module(package).__all__)


def homes() -> dict[tuple[str, str], str]:
    """Where each (package, name) is documented: in the first public package that has the same object under it."""
    first: dict[tuple[int, str], str] = {}
    return {(package, name): first.setdefault((id(value), name), package) for package, name, value in every_name()}


def every_name() -> Iterator[tuple[str, str, object]]:
    """(package, name, object) of each public name, in the order of `PUBLIC`."""
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in names(package):
            yield package, name, getattr(module, name)


def old_names() -> Iterator[tuple[str, str, str]]:
    """(package, old name, new name) of what still works with a `DeprecationWarning`."""
    for package in PUBLIC:
        for old, new in getattr(importlib.import_module(package), "RENAMED", {}).items():
            yield package, old, new
