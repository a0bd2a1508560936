"""The table of planted faults stays true: whoever changes a line that a fault changes has to renew the fault."""

from __future__ import annotations

from collections import Counter

from mutations.parts import FAULTS
from mutations.planting import misfits

EVERY = [fault for faults in FAULTS.values() for fault in faults]


def test_every_fault_can_be_planted():
    assert misfits(EVERY) == []


def test_every_fault_changes_something_and_has_a_name_of_its_own():
    assert [name for name, times in Counter(fault.name for fault in EVERY).items() if times > 1] == []
    assert [fault.name for fault in EVERY if fault.old == fault.new or not fault.tests or not fault.wrong] == []


def test_there_are_enough():
    assert len(EVERY) >= 70
    assert min(map(len, FAULTS.values())) >= 8
