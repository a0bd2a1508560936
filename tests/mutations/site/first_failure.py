"""A pytest plugin: writes the first test that fails into the file that FIRST_FAILURE names."""

from __future__ import annotations

import os
from pathlib import Path


def _note(report):
    path = Path(os.environ["FIRST_FAILURE"])
    if report.failed and not path.exists():
        path.write_text(report.nodeid)


def pytest_runtest_logreport(report):
    _note(report)


def pytest_collectreport(report):
    _note(report)
