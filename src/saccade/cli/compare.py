"""`saccade compare`."""

from __future__ import annotations

import typer

from ._compare_options import Chosen, Measuring, Output, Source, Tasks
from ._options import Grouped, flattened

EPILOG = """
Exit status: 0 measured, 2 bad input, 130 stopped by Ctrl-C (what was measured until then is shown and written).
"""


def register(app: typer.Typer) -> None:
    app.command("compare", cls=Grouped, epilog=EPILOG)(flattened(compare))


def compare(source: Source, chosen: Chosen, measuring: Measuring, output: Output, tasks: Tasks) -> None:
    """Choose an attention: time, memory and error of each mechanism against exact attention, and one sentence of advice.

    Without options on the q, k, v of the embedded model reading the start of a novel.
    """
    if tasks.task is not None:
        from ._compare_tasks import compare_tasks

        compare_tasks(tasks, chosen, measuring, output)
        return
    raise typer.Exit(2)
