"""How a training command ends: what it says where it was stopped, and its exit status."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import typer

EPILOG = """
Device: a GPU if PyTorch finds one, otherwise the CPU; with ACCELERATE_USE_CPU=1 always the CPU. `accelerate launch -m
saccade ...` uses several GPUs.

Exit status: 0 trained (early stopping included), 2 bad input, a full disk at the end, or a loss that is not finite
(anomaly.txt in --out says where), 130 stopped by Ctrl-C, 143 by SIGTERM; the last two leave a checkpoint of the last
step, and --resume goes on from there.
"""


@contextlib.contextmanager
def ending(out: Path) -> Iterator[None]:
    """A run into `out`: if a signal ended it, a line says so and how to continue."""
    from ..make.training import Stopped
    from ..make.training.processes import OtherProcessFailed, is_main_process

    try:
        yield
    except OtherProcessFailed:
        raise typer.Exit(2) from None
    except Stopped as stopped:
        if is_main_process():
            typer.echo(f"saccade: stopped; {out} keeps the best weights and the last; --resume goes on", err=True)
        raise typer.Exit(143 if stopped.signal == signal.SIGTERM else 130) from None
