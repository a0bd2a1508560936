"""The verdict of a run: lines that say how far its result can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .run_folder.layout import VERDICT
from .settings import Settings

UNTRAINED = "not a result"  # begins lines that `saccade predict` repeats
STILL_FALLING = 0.005  # relative decrease of the last validation loss that counts as falling


def verdict(curve: Sequence[Mapping[str, float]], settings: Settings, steps_done: int) -> list[str]:
    """Whether the warm-up had finished, and whether the validation loss was still falling."""
    longer = "--minutes or --steps" if settings.minutes is not None else "--steps or --epochs"
    if steps_done < settings.warmup:
        return [
            f"{UNTRAINED}: the run ended in its warm-up, after {steps_done:,} of {settings.warmup:,} steps; "
            f"give it more {longer}"
        ]
    losses = [entry["validation_loss"] for entry in curve]
    if len(losses) < 2:
        return ["one evaluation: whether the validation loss was still falling is unknown"]
    if losses[-1] < min(losses[:-1]) * (1 - STILL_FALLING):
        return [f"the validation loss was still falling: more {longer} may give a better model"]
    return ["the validation loss no longer fell"]


def untrained(folder: Path) -> list[str]:
    """The lines of a run's verdict that say that the model is not trained enough."""
    path = folder / VERDICT
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if line.startswith(UNTRAINED)]
