"""The corpus through `verify_stack`: each fault is named by its probe, in its words, with a small example; twins are
silent. Fails for a probe that misses a reported fault, explains it as another, or accuses the mended stack.
"""

from __future__ import annotations

import pytest
from stacks.reports.every import CASES
from stacks.reports.model import Model, padded

import saccade
from saccade.verification.stacks.probes import PROBES

KNOWN = {probe.name for probe in PROBES}
MOST_OTHERS = 2
PARAMETERS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.report == "planted" else [])
    for case in CASES
    if KNOWN & set(case.probes)
]


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # tensors of a few numbers: more threads only wait for each other


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_fault_is_named(case):
    report = saccade.verify_stack(**case.faulty())
    errors = [finding for finding in report.findings if finding.severity == "error"]
    named = [finding for finding in errors if finding.probe in case.probes]
    assert named, report
    finding = named[0]
    assert all(words in f"{finding.message} {finding.where}" for words in case.words), finding.message
    assert sum(map(len, finding.example)) <= case.tokens, finding.example
    assert len(errors) - 1 <= MOST_OTHERS, report


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_mended_stack_is_silent(case):
    report = saccade.verify_stack(**case.right())
    assert not report.findings, report


class NeedsMask(Model):
    def forward(self, input_ids, attention_mask, **others):
        assert attention_mask is not None
        return super().forward(input_ids, attention_mask, **others)


def test_a_model_that_needs_its_mask_is_not_accused_of_it():
    assert not saccade.verify_stack(NeedsMask(), batch=padded, causal=True).findings
