"""Plants faults one by one in a copy of the tree and says which test catches each: python tests/mutations/run.py

Status 1 where a fault survived, or a test that caught one fails without it; 2 where a fault cannot be planted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.fault import Fault
from mutations.parts import FAULTS
from mutations.planting import Copy, misfits

SURVIVED = "survived"


def main() -> int:
    given = _arguments()
    chosen = _chosen(given)
    cannot = misfits(chosen)
    if cannot:
        print("\n".join(cannot), file=sys.stderr)
        return 2
    left = [fault.name for fault in chosen if fault.native and not given.native]
    chosen = [fault for fault in chosen if fault.name not in left]
    print("| fault | caught by | s |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder))
        caught = {fault.name: _caught(copy, fault, given) for fault in chosen}
        if any(fault.native for fault in chosen):
            copy.build()
        tests = sorted({test for test in caught.values() if "::" in test})
        wrong = copy.failures(tests, given.seconds) if tests else set()
    survivors = [name for name, test in caught.items() if test == SURVIVED]
    print(f"\n{len(caught)} faults planted, {len(caught) - len(survivors)} caught, {len(survivors)} survived.")
    for words, names in (
        ("Survived", survivors),
        ("Left out (--native)", left),
        ("Fails without a fault", sorted(wrong)),
    ):
        if names:
            print(f"{words}: {', '.join(names)}")
    return int(bool(survivors or wrong))


def _caught(copy: Copy, fault: Fault, given: argparse.Namespace) -> str:
    """The first test that fails, or SURVIVED."""
    start = time.perf_counter()
    steps = [([test], 0) for test in fault.tests]  # one by one: pytest would make one folder of overlapping paths
    if given.whole:
        steps.append(([], given.processes))
    if given.slow:
        steps.append((["-m", "slow"], given.processes))
    found = ""
    with copy.planted(fault):
        for arguments, processes in steps:
            found = found or copy.first_failure(arguments, given.seconds, processes=processes)
    print(f"| {fault.name} | {found or SURVIVED} | {time.perf_counter() - start:.0f} |", flush=True)
    return found or SURVIVED


def _chosen(given: argparse.Namespace) -> list[Fault]:
    every = [fault for part in given.part or FAULTS for fault in FAULTS[part]]
    unknown = set(given.only or []) - {fault.name for fault in every}
    if unknown:
        sys.exit(f"--only: there is no fault {', '.join(sorted(unknown))}")
    return [fault for fault in every if not given.only or fault.name in given.only]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--part", nargs="+", choices=FAULTS, help="the faults of these parts")
    parser.add_argument("--native", action="store_true", help="those in C++, too; the module is built for each")
    parser.add_argument("--whole", action="store_true", help="the whole fast suite where the tests named do not fail")
    parser.add_argument("--slow", action="store_true", help="then the slow suite")
    parser.add_argument("--processes", type=int, default=0, metavar="N", help="processes of --whole and --slow")
    parser.add_argument("--seconds", type=float, default=900.0, help="a run that takes longer counts as caught")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
