"""placeholder"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Report:
    found: Any
    clean: tuple
    note: str = ""

    @property
    def place(self):
        return "?"


def find_anomaly(model, tokens):
    return Report(None, ())
