"""`saccade compare --task` with another model: how many tokens the short convolution before the layers sees.

    python benchmarks/compare_tasks.py --task recall --steps 2000 --taps 0

All options of `saccade compare` for tasks are taken.
"""

from __future__ import annotations

import dataclasses
import sys

import typer

from saccade.benchmark.tasks import ModelShape
from saccade.cli import _run
from saccade.cli._options import GroupedCommand, flattened, option
from saccade.cli._parts._compare_options import (
    ComparedOptions,
    CompareMeasuringOptions,
    CompareOutputOptions,
    TaskOptions,
)
from saccade.cli._parts._compare_tasks import compare_tasks


@dataclasses.dataclass(frozen=True)
class ConvolutionOptions:
    """Model"""

    taps: int = option(ModelShape().taps, "Tokens that a short convolution before the layers sees; 0: none.")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
@flattened
def main(
    chosen: ComparedOptions,
    measuring: CompareMeasuringOptions,
    output: CompareOutputOptions,
    tasks: TaskOptions,
    model: ConvolutionOptions,
) -> None:
    """Train a small model with each mechanism, as `saccade compare --task` does; without --task on all tasks."""
    wanted = tasks if tasks.task else dataclasses.replace(tasks, task=["all"])
    compare_tasks(wanted, chosen, measuring, output, ModelShape(taps=model.taps))


if __name__ == "__main__":
    sys.exit(_run.run(None, app))
