"""Each deliberately wrong implementation is named, with few other errors; its right twin is clean."""

from __future__ import annotations

import difflib

import fault_table
import harness
import pytest
from wrong.fault import STYLES

from saccade.verification.findings._finding import FAMILIES

FAULTS = harness.every_fault()
# Quick ones, of different families and styles; each check has tests of its own.
SAMPLE = ("over the heads", "wraps to the wrong slot")


def cases(faults):
    return [pytest.param(one, id=f"{harness.family_of(one)}: {one.name}") for one in faults]


def styles():
    return [pytest.param(one, id=f"{one.file} {one.target}") for one in STYLES]


def assert_named(fault):
    report = harness.run(fault)
    verdict = harness.judge(fault, report)
    assert verdict.named, f"{fault.wrong}: expected an error of {' or '.join(fault.families)}\n{report}"
    assert len(verdict.others) <= harness.MOST_OTHERS, f"{fault.wrong}\n{report}"
    assert fault_table.line(fault, verdict) in fault_table.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("fault", cases(one for one in FAULTS if one.name not in SAMPLE))
def test_a_fault_is_named(fault):
    assert_named(fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", cases(one for one in FAULTS if one.name in SAMPLE))
def test_a_fault_that_is_run_always_is_named(fault):
    assert_named(fault)


@pytest.mark.slow
@pytest.mark.parametrize("style", styles())
def test_a_right_twin_is_clean(style):
    report = harness.run_right(style)
    assert report.ok, str(report)
    assert not harness.broken_off(report)


def test_every_family_has_four_faults_and_names_are_unique():
    families = [harness.family_of(one) for one in FAULTS]
    assert all(families.count(family) >= 4 for family in FAMILIES)
    names = [(harness.family_of(one), one.name) for one in FAULTS]
    assert len(set(names)) == len(names)
    assert set(SAMPLE) <= {name for _, name in names}
    assert all(set(one.families) <= set(FAMILIES) for one in FAULTS)


def test_a_fault_is_one_small_change():
    for fault in FAULTS:
        compile(fault.source, fault.name, "exec")
        lines = list(difflib.ndiff(fault.style.source.splitlines(), fault.source.splitlines()))
        assert 1 <= sum(line.startswith(("-", "+")) for line in lines) <= 10, fault.name
        assert fault.wrong
        assert fault.line == "" or fault.to_blame(), fault.name


def test_the_page_lists_every_fault():
    shown = fault_table.PAGE.read_text(encoding="utf-8")
    assert all(f"- {one.name}: {one.wrong}" in shown for one in FAULTS)
    assert sum(line.startswith("- ") for line in shown.splitlines()) == len(FAULTS)


def test_the_table_of_the_page_counts_its_lines():
    """Each line is held to what is found by the test of its fault; right ones have no error in any test."""
    head, *parts = fault_table.PAGE.read_text(encoding="utf-8").split("\n## ")
    assert f"one of {len(fault_table.rights())}\nright implementations" in head
    counted = {f"`{part.splitlines()[0]}`": part.splitlines() for part in parts}
    assert list(counted) == [f"`{family}`" for family in FAMILIES]
    for name, lines in {**counted, "all": "\n".join(parts).splitlines()}.items():
        states = [line.rpartition("). ")[2] for line in lines if line.startswith("- ")]
        named = sum(state.startswith("Named") for state in states)
        blamed = sum(", its line blamed" in state for state in states)
        asked = sum(" blamed" in state for state in states)
        assert f"| {name} | {len(states)} | {named} | {blamed} of {asked} | 0 |" in head
