"""`saccade compare --task`."""

from __future__ import annotations

from ._compare_options import Chosen, Measuring, Output, Tasks


def compare_tasks(tasks: Tasks, chosen: Chosen, measuring: Measuring, output: Output) -> None:
    """Train a small model with each mechanism on the tasks that are named, and show what it solves."""
    from ..comparing.tasks import run_tasks

    run_tasks(tasks, chosen, measuring, output)
