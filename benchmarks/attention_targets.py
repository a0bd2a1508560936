"""Hold the native kernels to their performance targets (`targets/catalogue.py`), beside PyTorch and other runtimes.

    python benchmarks/attention_targets.py --quick --json benchmarks/results/attention.json \\
        --markdown benchmarks/results/attention.md
    python benchmarks/attention_targets.py --only "decode float32"

With --quick this takes four minutes on two cores, otherwise about 20 (extrapolated from parts). Exit status: 0 all are
met or out of reach, 1 a result was wrong, 3 a target was missed or not measured, 4 readings were too noisy to tell.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import torch
from rich.progress import Progress
from targets.catalogue import PEERS, PerformanceTarget, TargetPreset, medians, targets
from targets.judging import TargetReport, hold_to
from targets.page import outcome_line, outcome_table, page
from targets.subject import forced

import saccade
from saccade.benchmark.attention import BenchmarkReport, Budget, MeasurementGroup, MeasurementSettings, sets
from saccade.benchmark.attention.machine import describe, keep_freed_memory, last_level_cache

SAME = ("processor", "cores", "threads", "instruction_set", "saccade", "torch")  # of a run that is resumed


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backend", default="native,auto", help="the backend held to them, and the one that chooses")
    parser.add_argument("--set", default=None, help="a lower instruction set to force for one target [avx2]")
    parser.add_argument("--against", default=",".join(PEERS), help="contenders, or none")
    parser.add_argument("--only", action="append", help="only targets whose name has all of these words")
    parser.add_argument("--resume", action="store_true", help="keep what the --json file has of this machine")
    parser.add_argument("--quick", action="store_true", help="fewer widths, lengths and rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, help="for each target [1; quick: 0.5]")
    parser.add_argument("--rounds", type=int, default=7, help="at least; of seven readings one in six may be off")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(given)


def preset_of(args: argparse.Namespace) -> TargetPreset:
    subject, _, choice = args.backend.partition(",")
    against = () if args.against == "none" else tuple(args.against.split(","))
    if unknown := set(against) - set(PEERS):
        raise SystemExit(f"--against: expected {', '.join(PEERS)} or none, got {', '.join(sorted(unknown))}")
    native = sets.compiled()
    lower = args.set
    if lower is None and native and "avx2" in native.sets() and native.active() not in ("avx2", "baseline"):
        lower = "avx2"
    with forced(lower):  # an error now if it is not there
        pass
    dots = sets.peak("bfloat16", 1, 1.0) is not None
    return TargetPreset(subject, choice or subject, lower, dots, last_level_cache() or 2**25, against, args.quick)


def chosen_of(every: list[PerformanceTarget], only: list[str]) -> set[str]:
    words = [word for group in only for word in group.split()]
    chosen = {target.title for target in every if all(word in target.title.split() for word in words)}
    if not chosen:
        raise SystemExit(f"--only: no target has the words {' '.join(words)}")
    return chosen


def resumed(file: Path, machine: dict[str, object]) -> list[MeasurementGroup]:
    """The groups of an earlier run on this machine."""
    earlier = BenchmarkReport.from_json(file.read_text(encoding="utf-8"))
    for name in SAME:
        if earlier.machine[name] != machine[name]:
            raise SystemExit(f"--resume: {name} of {file} is {earlier.machine[name]}, here {machine[name]}")
    return earlier.groups


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    keep_freed_memory()
    preset = preset_of(args)
    every = targets(preset)
    chosen = chosen_of(every, args.only or [])
    budget = Budget(args.seconds if args.seconds is not None else 0.5 if args.quick else 1.0, args.rounds)
    settings = MeasurementSettings(args.threads, budget, again=2)
    command = shlex.join(["python", "benchmarks/attention_targets.py", *(sys.argv[1:] if given is None else given)])
    report = TargetReport(describe(saccade.__version__, args.threads), {"command": command, **vars(budget)})
    if args.resume and args.json and args.json.exists():
        report.groups = resumed(args.json, report.machine)
    with Progress(disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("targets", total=len(chosen))

        def advance(group: MeasurementGroup) -> None:
            progress.update(bar, advance=1, description=group.title)
            if args.json:
                args.json.write_text(report.as_json(), encoding="utf-8")

        hold_to(every, medians(preset), chosen, report, settings, advance)
    print("\n".join([*outcome_table(report).lines(), "", outcome_line(report)]))
    if args.markdown:
        args.markdown.write_text(page(report), encoding="utf-8")
    verdicts = {outcome.verdict for outcome in report.outcomes}
    if any(row.status == "wrong" for row in report.rows):
        return 1
    return 3 if verdicts & {"missed", "not measured"} else 4 if "noisy" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
