"""The table of the corpus: `python tests/verification/stacks/report_table.py` writes it from the cases."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from stacks.reports.every import CASES, UNREAD

PAGE = Path(__file__).parents[3] / "docs" / "verify-stacks.md"
INTRODUCTION = """# Faults between correct parts

For people who want to know which faults of whole stacks `saccade.verify_stack` is held to: public reports, and planted
variants of them.

Each row is a small stack of our own with one fault, and the same stack without it ([the
corpus](../tests/verification/stacks/reports/every.py)). Tests prove each fault against a dense float64 model that is
given the wrong pairs or positions. Others run `verify_stack`: the probe in the row names the fault, with an example of
at most that many tokens, and the mended stack gets no finding.

The text of reports with a star could not be had. Their stacks have the fault of the kind that the report is known for.

`python tests/verification/stacks/report_table.py` writes this page.

| report | fault | probe | tokens |
|---|---|---|---|
"""


def page() -> str:
    return INTRODUCTION + "".join(
        f"| {_report(case.report)} | {case.fault} | {', '.join(case.probes)} | {case.tokens} |\n" for case in CASES
    )


def _report(report: str) -> str:
    if report == "planted":
        return report
    place, number = report.split("#")
    star = "*" if report in UNREAD else ""
    return f"[{place.partition('/')[2]}#{number}](https://github.com/{place}/issues/{number}){star}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
