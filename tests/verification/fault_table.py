"""What was planted and found: `python tests/verification/fault_table.py` runs all of it and writes the page.

It takes some minutes. Read the diff before you commit it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import harness
import test_right
import torch
from wrong.fault import STYLES, Fault, Style

import saccade
from saccade.verification import Report
from saccade.verification.findings._finding import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "verify-faults.md"

INTRODUCTION = """# What `saccade verify` finds

For people who want to know how reliable `saccade verify` is: which planted faults it finds, and how often it is wrong.

{faults} implementations of attention were broken on purpose, each in one way, and verified. They are made from
{styles} right ones in common styles: functions, single heads, fused projections, einsum, grouped queries, caches,
encoder-decoders, whole models. Each differs from its right twin by the change in its line below.

A fault is *named* when an error of a fitting family reports it, with at most two other errors beside it. Its *line* is
blamed when that error points to the changed line. A *false alarm* is an error of the family on one of {rights}
right implementations: the right twins, Saccade's own, PyTorch's, those of transformers and of a third party, and more
that were written for this.

`python tests/verification/fault_table.py` writes this page, and tests compare it with what `saccade verify` finds.

"""


class Results:
    """How each fault was judged, and the families of the errors on each right implementation."""

    def __init__(self, verdicts: dict[Fault, harness.Verdict], alarms: Sequence[Iterable[str]]):
        self.verdicts, self.alarms = verdicts, alarms

    def of(self, family: str) -> list[tuple[Fault, harness.Verdict]]:
        return [(fault, seen) for fault, seen in self.verdicts.items() if harness.family_of(fault) == family]


def found(jobs: int = 1, progress: Callable[[int, int], None] = lambda done, of: None) -> Results:
    """Everything verified, in `jobs` processes."""
    faults, count = harness.every_fault(), len(rights())
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        verdicts = [pool.submit(_verdict, index) for index in range(len(faults))]
        alarms = [pool.submit(_alarms, index) for index in range(count)]
        for done, _ in enumerate(as_completed([*verdicts, *alarms]), 1):
            progress(done, len(faults) + count)
    return Results(dict(zip(faults, (one.result() for one in verdicts), strict=True)), [one.result() for one in alarms])


def _verdict(index: int) -> harness.Verdict:
    fault = harness.every_fault()[index]
    return harness.judge(fault, harness.run(fault))


def _alarms(index: int) -> set[str]:
    """The families that give an error on a right implementation."""
    right = rights()[index]
    report = harness.run_right(right) if isinstance(right, Style) else _verified(right)
    assert not harness.broken_off(report), harness.broken_off(report)
    return {finding.family for finding in report.errors}


def rights() -> list[Style | test_right.Right]:
    return [*STYLES, *(right for kind in test_right.KINDS.values() for right in kind)]


def _verified(right: test_right.Right) -> Report:
    with torch.random.fork_rng(), harness.without_compile():
        torch.manual_seed(11)
        return saccade.verify(right.make(), promise=right.promise, isolated=False)


def page(results: Results) -> str:
    styles = {fault.style.file for fault in results.verdicts}
    head = INTRODUCTION.format(faults=len(results.verdicts), styles=len(styles), rights=len(results.alarms))
    lists = [_list(family, results) for family in FAMILIES]
    return head + _table(results) + "\n".join(["", *lists])


def _table(results: Results) -> str:
    alarms = Counter(family for families in results.alarms for family in families)
    rows = [_row(f"`{family}`", results.of(family), alarms[family]) for family in FAMILIES]
    rows.append(_row("all", list(results.verdicts.items()), sum(alarms.values())))
    return "| family | planted | named | line blamed | false alarms |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(name: str, seen: Sequence[tuple[Fault, harness.Verdict]], alarms: int) -> str:
    named = sum(verdict.right for _, verdict in seen)
    lines = [verdict.line for _, verdict in seen if verdict.line is not None]
    return f"| {name} | {len(seen)} | {named} | {sum(lines)} of {len(lines)} | {alarms} |"


def _list(family: str, results: Results) -> str:
    return "\n".join([f"## {family}", "", *(line(fault, verdict) for fault, verdict in results.of(family))]) + "\n"


def line(fault: Fault, verdict: harness.Verdict) -> str:
    """What the page says of one fault."""
    by = f" by `{verdict.family}`" if verdict.family != harness.family_of(fault) else ""
    state = f"Named{by}" if verdict.right else "Not named" if not verdict.named else "Drowned by others"
    blamed = {True: ", its line blamed", False: ", another line blamed or none", None: ""}[verdict.line]
    return f"- {fault.name}: {fault.wrong} ([{fault.style.file}]({_link(fault)})). {state}{blamed}."


def _link(fault: Fault) -> str:
    return f"../tests/verification/wrong/styles/{fault.style.file}.py"


def main() -> int:
    jobs = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1
    results = found(jobs, lambda done, of: print(f"\r{done} of {of}", end="", flush=True))
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"\n{PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
