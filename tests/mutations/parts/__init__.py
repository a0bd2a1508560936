"""The faults, one file for each part of the code. `FAULTS` has them by part."""

from __future__ import annotations

from ..fault import Fault
from . import (
    attributions,
    backends,
    caches,
    decoding,
    distributed,
    edits,
    flex,
    kernels,
    masks,
    measures,
    models,
    monitoring,
    pictures,
    positions,
    programs,
    senses,
    statistics,
    structures,
    tasks,
    texts,
    training,
    verification,
)

FAULTS: dict[str, tuple[Fault, ...]] = {
    "masks": masks.FAULTS,
    "backends": backends.FAULTS,
    "flex": flex.FAULTS,
    "kernels": kernels.FAULTS,
    "programs": programs.FAULTS,
    "statistics": statistics.FAULTS,
    "texts": texts.FAULTS,
    "caches": caches.FAULTS,
    "positions": positions.FAULTS,
    "structures": structures.FAULTS,
    "tasks": tasks.FAULTS,
    "training": training.FAULTS,
    "verification": verification.FAULTS,
    "monitoring": monitoring.FAULTS,
    "models": models.FAULTS,
    "senses": senses.FAULTS,
    "decoding": decoding.FAULTS,
    "pictures": pictures.FAULTS,
    "attributions": attributions.FAULTS,
    "measures": measures.FAULTS,
    "edits": edits.FAULTS,
    "distributed": distributed.FAULTS,
}
