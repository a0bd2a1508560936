"""`saccade bench` with what is for those who work on the kernels: another clock, and the targets they are held to.

    python benchmarks/attention.py --targets --quick
    python benchmarks/attention.py --targets --only "decode float32"
    python benchmarks/attention.py --clock cpu --threads 1 --length 2k

All options of `saccade bench` are taken, and its exit statuses are given.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import kernel_targets
import typer

from saccade.cli import _run, bench
from saccade.cli._bench_options import BenchMeasuringOptions, BenchOutputOptions, CaseOptions, ContenderOptions
from saccade.cli._options import GroupedCommand, flattened, option


@dataclasses.dataclass(frozen=True)
class KernelOptions:
    """Work on the kernels"""

    clock: str = option("wall", "wall, or cpu: one thread's own time, for a machine in use.")
    targets: bool = option(False, "Measure what the native kernels are held to, not the cases above.", "--targets")
    only: list[str] | None = option(
        None, "Only the targets whose name has all of these words; may be given again.", metavar="WORDS"
    )


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=GroupedCommand)
@flattened
def main(
    cases: CaseOptions,
    contenders: ContenderOptions,
    measuring: BenchMeasuringOptions,
    output: BenchOutputOptions,
    kernels: KernelOptions,
) -> None:
    """Time attention on this machine as `saccade bench` does."""

    def chosen(cache: int) -> tuple[int, bench.Measuring]:
        subject, *rest = contenders.backend.split(",")
        lower = (contenders.instruction_set or "avx2").split(",")[0]
        preset = kernel_targets.TargetPreset(subject, rest[0] if rest else subject, lower, cache, measuring.quick)
        wanted = [word for words in kernels.only or [] for word in words.split()]
        found = [
            target for target in kernel_targets.targets(preset) if all(word in target.title.split() for word in wanted)
        ]
        if not found:
            raise ValueError(f"only: no target has the words {' '.join(wanted)}")
        return len(found), functools.partial(kernel_targets.hold_to, found)

    setup = bench.Setup("python benchmarks/attention.py", kernels.clock, chosen if kernels.targets else None)
    bench.run(cases, contenders, measuring, output, setup)


if __name__ == "__main__":
    sys.exit(_run.run(None, app))
