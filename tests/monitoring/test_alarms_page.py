"""The page about alarms and the code name the same thresholds and kinds."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from saccade.monitoring import Thresholds
from saccade.monitoring._alarms_rules import ADVICE

PAGE = (Path(__file__).parents[2] / "docs" / "alarms.md").read_text(encoding="utf-8")


def test_every_threshold_stands_on_the_page_with_its_value():
    said: dict[str, set[float]] = {}
    for name, number in re.findall(r"`(\w+)` (\d[\d.]*\d|\d)", PAGE):
        said.setdefault(name, set()).add(float(number))
    said["fallen"] = {1 / 3} if "and a third of its highest" in PAGE else set()
    values = dataclasses.asdict(Thresholds())
    assert said.keys() == values.keys()
    for name, value in values.items():
        assert said[name] == {value}, name


def test_every_kind_has_a_line_in_the_table():
    rows = re.findall(r"^\| ([^|(]+?) (?:\([^|]+\) )?\|", PAGE, re.MULTILINE)
    assert rows[0] == "alarm"
    assert sorted(row for row in rows if row in ADVICE) == sorted(ADVICE)
