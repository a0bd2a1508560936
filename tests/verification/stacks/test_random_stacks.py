"""Random stacks of model, padding, packing, cache and window: right ones are silent, and one fault is named by its
probe. Fails for a combination of parts that hides a fault from its probe, or that a probe takes for a fault.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from stacks.reports.batches import Standardised
from stacks.reports.caches import LateValues
from stacks.reports.masks import CausalFlag
from stacks.reports.model import Cache, Model, decoding, packed, padded
from stacks.reports.windows import OneMore

import saccade

WINDOW = 3
CLASSES = {"window": OneMore, "triangle": CausalFlag, "neighbours": Standardised}


class Sliding(Cache):
    def kept(self, states):
        return states[:, :, -(WINDOW - 1) :]


class Parts(NamedTuple):
    positions: str
    layers: int
    window: int | None
    left: bool  # padding
    pack: str  # "", "positions", "blocks"
    cache: bool

    def stack(self, fault: str = ""):
        model = CLASSES.get(fault, Model)(positions=self.positions, layers=self.layers, window=self.window)
        padding = {"mask": fault != "padding seen", "positions": self.left and not fault.startswith("padding")}
        made = {"model": model, "causal": True, "batch": partial(padded, left=self.left, **padding)}
        if self.window:
            made["window"] = self.window
        if self.pack:
            restart = not fault.startswith("pack")
            blocks = fault == "pack counts on" or (self.pack == "blocks" and restart)
            made["pack"] = partial(packed, positions=restart, mask="blocks" if blocks else "")
        if self.cache:
            fresh = LateValues if fault == "cache" else Sliding if self.window else Cache
            made["decode"] = decoding(model, fresh)
        return made

    def faults(self):
        """Each fault that these parts can have, with the probe that names it."""
        learned = self.positions == "learned"
        every = {
            "padding seen": ("batch", self.left),
            "padding counted": ("batch", self.left and learned),
            "pack seen": ("packing", bool(self.pack)),
            "pack counts on": ("packing", bool(self.pack) and learned),
            "cache": ("cache", self.cache),
            "window": ("reach", self.window is not None),
            "triangle": ("causality", True),
            "neighbours": ("batch", True),
        }
        return {name: probe for name, (probe, fits) in every.items() if fits}


PARTS = st.builds(
    Parts,
    st.sampled_from(["learned", "rotary"]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, WINDOW]),
    st.booleans(),
    st.sampled_from(["", "positions", "blocks"]),
    st.booleans(),
)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def several(examples):
    checks = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=checks)


@pytest.mark.slow
@several(3)
@given(PARTS)
def test_right_stacks_are_silent(parts):
    report = saccade.verify_stack(**parts.stack())
    assert not report.findings, (parts, report)


@pytest.mark.slow
@several(4)
@given(st.data())
def test_one_fault_is_named(data):
    parts = data.draw(PARTS)
    fault = data.draw(st.sampled_from(sorted(parts.faults())))
    report = saccade.verify_stack(**parts.stack(fault))
    errors = [finding.probe for finding in report.findings if finding.severity == "error"]
    assert parts.faults()[fault] in errors, (parts, fault, report)


@pytest.mark.slow
@several(60)
@given(PARTS)
def test_many_right_stacks(parts):
    assert not saccade.verify_stack(**parts.stack()).findings


@pytest.mark.slow
@several(80)
@given(st.data())
def test_many_faults(data):
    test_one_fault_is_named.hypothesis.inner_test(data)
