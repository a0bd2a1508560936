"""Runs `verify` on the deliberately wrong implementations of `wrong/`, and says which are named.

    python tests/verification/harness.py [FAMILY or part of a name ...] [--full] [--right] [--write DIR]

One row for each fault: whether an error of a fitting family names it, errors of other families, and whether the finding
blames the line that is wrong. `--full` prints the findings, `--right` runs the right twins, `--write` writes the
sources as files that `saccade verify` can be pointed to.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from wrong.fault import STYLES, Fault, Style

import saccade
from saccade.verification import Finding, Report, checks
from saccade.verification.findings._finding import FAMILIES

MOST_OTHERS = 2


def every_fault() -> tuple[Fault, ...]:
    """All faults, in the order of the families."""
    names = [family.replace("-", "_") for family in FAMILIES]
    return tuple(fault for name in names for fault in importlib.import_module(f"wrong.{name}").FAULTS)


def family_of(fault: Fault) -> str:
    """The family that the fault was written for."""
    return fault.families[0]


@dataclass(frozen=True)
class Verdict:
    """How a report does justice to a fault."""

    named: bool
    family: str  # the one that named it
    others: tuple[str, ...]  # families of all other errors, one for each error
    line: bool | None  # whether a fitting finding blames the wrong line; None: there is none to blame

    @property
    def right(self) -> bool:
        return self.named and len(self.others) <= MOST_OTHERS


def run(fault: Fault) -> Report:
    """The report on a fault, made in this process."""
    with loaded(fault.source, fault.style.file) as names:
        arguments = fault.style.arguments if fault.arguments is None else fault.arguments
        return _verify(
            names,
            fault.target or fault.style.target,
            arguments,
            fault.style.causal if fault.causal is None else fault.causal,
            fault.promise or fault.style.promise,
            fault.style,
            fault.compiled,
        )


def run_right(style: Style, compiled: bool = False) -> Report:
    """The report on a right twin."""
    with loaded(style.source, style.file) as names:
        return _verify(names, style.target, style.arguments, style.causal, style.promise, style, compiled)


def broken_off(report: Report) -> tuple[Finding, ...]:
    """Findings that say that a check broke off: a defect of Saccade's, whatever the target is."""
    return tuple(finding for finding in report.findings if "broke off" in finding.message)


def judge(fault: Fault, report: Report) -> Verdict:
    """How the report does justice to the fault.

    Raises:
        AssertionError: a check broke off.
    """
    assert not broken_off(report), broken_off(report)
    severities = ("error",) if fault.severity == "error" else ("error", "warning", "note")
    fitting = [
        finding for finding in report.findings if finding.family in fault.families and finding.severity in severities
    ]
    fitting.sort(key=lambda finding: fault.families.index(finding.family))
    others = tuple(finding.family for finding in report.errors if not fitting or finding is not fitting[0])
    blamed = fault.to_blame()
    line = any(finding.location is not None and finding.location.code.strip() in blamed for finding in fitting)
    return Verdict(bool(fitting), fitting[0].family if fitting else "", others, line if blamed else None)


@contextmanager
def loaded(source: str, file: str) -> Iterator[dict[str, Any]]:
    """The names of a file that holds `source`, for as long as that file is there."""
    with tempfile.TemporaryDirectory(prefix="wrong-") as folder:
        path = Path(folder) / f"{file}.py"
        path.write_text(source, encoding="utf-8")
        name = f"_target_{file}_{Path(folder).name.replace('-', '_')}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield module.__dict__
        finally:
            del sys.modules[name]


def made(names: dict[str, Any], target: str) -> Any:
    """The target as `verify` is given it: a function or class by its name, an instance where the name is a call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return eval(target, names)


def _verify(
    names: dict[str, Any], target: str, arguments: Any, causal: bool | None, promise: Any, style: Style, compiled: bool
) -> Report:
    how = {} if style.how is None else {"how": style.how}
    with nullcontext() if compiled else without_compile():
        return saccade.verify(
            made(names, target),
            causal,
            style.embed_dim,
            arguments=dict(arguments) or None,
            promise=promise,
            isolated=False,
            **how,
        )


@contextmanager
def without_compile() -> Iterator[None]:
    """Nothing is compiled within, which would take most of the time."""
    before = checks.CHECKS
    checks.CHECKS = tuple(check for check in before if "compile" not in check.name)
    try:
        yield
    finally:
        checks.CHECKS = before


def chosen(words: Sequence[str]) -> tuple[Fault, ...]:
    """The faults of these families, or with these words in their names; all where none are given."""
    faults = every_fault()
    if not words:
        return faults
    return tuple(one for one in faults if any(word == family_of(one) or word in one.name for word in words))


def row(name: str, verdict: Verdict, seconds: float) -> str:
    line = {True: "yes", False: "no", None: "-"}[verdict.line]
    others = " ".join(verdict.others) or "-"
    mark = " " if verdict.right else "!"
    return f"{mark} {name:58.58} {verdict.family or 'NOT NAMED':17} line {line:4} {seconds:5.1f}s  others: {others}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="families, or parts of names")
    parser.add_argument("--full", action="store_true", help="print what was found")
    parser.add_argument("--right", action="store_true", help="run the right twins in place of the faults")
    parser.add_argument("--write", type=Path, help="write the sources here and run nothing")
    options = parser.parse_args(arguments)
    if options.write:
        return _write(options.write, chosen(options.words))
    return _right(options) if options.right else _wrong(options)


def _wrong(options: argparse.Namespace) -> int:
    faults, wrong = chosen(options.words), 0
    for fault in faults:
        start = time.perf_counter()
        try:
            report = run(fault)
            verdict = judge(fault, report)
        except Exception as error:
            wrong += 1
            print(f"! {family_of(fault)}: {fault.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        wrong += not verdict.right
        print(row(f"{family_of(fault)}: {fault.name}", verdict, time.perf_counter() - start), flush=True)
        if options.full:
            _findings(report, fault)
    print(f"{len(faults)} faults, {wrong} not named or with more than {MOST_OTHERS} others")
    return bool(wrong)


def _right(options: argparse.Namespace) -> int:
    styles = [one for one in STYLES if not options.words or any(word in one.file for word in options.words)]
    wrong = 0
    for style in styles:
        start = time.perf_counter()
        try:
            report = run_right(style)
        except Exception as error:
            wrong += 1
            print(f"! {style.file} {style.target}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        clean = report.ok and not broken_off(report)
        wrong += not clean
        name = f"{style.file} {style.target}"
        print(
            f"{' ' if clean else '!'} {name:60.60} {time.perf_counter() - start:5.1f}s  "
            f"{' '.join(finding.family for finding in report.errors)}",
            flush=True,
        )
        if options.full or not clean:
            _findings(report)
    print(f"{len(styles)} right ones, {wrong} with an error")
    return bool(wrong)


def _findings(report: Report, fault: Fault | None = None) -> None:
    if fault is not None:
        print(f"      wrong: {fault.wrong}\n      lines: {fault.to_blame()}")
    print(f"      called: {report.called}")
    for finding in report.findings:
        print(f"      {finding.severity} {finding.family}: {finding.message}")
        for words in ("effect: " + finding.effect, "fix: " + finding.fix, _where(finding)):
            print(f"        {words}")


def _where(finding: Finding) -> str:
    return f"line {finding.location.line}: {finding.location.code}" if finding.location else "no line"


def _write(folder: Path, faults: Sequence[Fault]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for fault in faults:
        name = "".join(letter if letter.isalnum() else "_" for letter in f"{family_of(fault)}_{fault.name}")
        (folder / f"{name}.py").write_text(fault.source, encoding="utf-8")
    print(f"{len(faults)} files in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
