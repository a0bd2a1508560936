"""The corpus through `verify_stack`: each fault is named by its probe, in its words, with a small example; twins are
silent. Fails for a probe that misses a reported fault, explains it as another, or accuses the mended stack.
"""

from __future__ import annotations

import pytest
import torch
from stacks.reports.every import CASES, MODULES
from stacks.reports.model import Model, packed, padded
from torch.nn.functional import dropout, scaled_dot_product_attention

import saccade
from slowly import slow_after

MOST_OTHERS = 2
FAST = [module.CASES[0] for module in MODULES]  # one of each kind
PARAMETERS = [pytest.param(case, id=case.name, marks=[] if case in FAST else [pytest.mark.slow]) for case in CASES]


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


@pytest.mark.parametrize("case", slow_after(2, sorted(PARAMETERS, key=lambda case: bool(case.marks))))
def test_the_mended_stack_is_silent(case):
    report = saccade.verify_stack(**case.right())
    assert not report.findings, report


class NeedsMask(Model):
    def forward(self, input_ids, attention_mask, **others):
        assert attention_mask is not None
        return super().forward(input_ids, attention_mask, **others)


def test_a_model_that_needs_its_mask_is_not_accused_of_it():
    assert not saccade.verify_stack(NeedsMask(), batch=padded, causal=True).findings


class Dropping(Model):
    """Dropout of the functional form, of sdpa, and noise that is no dropout."""

    def __init__(self, noise=0.0):
        super().__init__(layers=2)
        self.noise = noise

    def attend(self, query, key, value, visible, call):
        rate = 0.3 if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=rate)
        return dropout(mixed, 0.2, self.training) + self.noise * self.training * torch.randn(mixed.shape)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_dropout_in_training_is_no_leak_of_a_pack(noise):
    assert not saccade.verify_stack(Dropping(noise), pack=packed, causal=True).findings


class ManualWithDropout(Model):
    """The rate chooses the path, and that path has no triangle."""

    def __init__(self):
        super().__init__()
        self.dropout = 0.1

    def reach(self, call, count):
        reached = super().reach(call, count)
        return torch.ones_like(reached) if self.training and self.dropout > 0 else reached


def test_a_path_that_is_chosen_by_the_rate_of_dropout():
    [finding, *_] = saccade.verify_stack(ManualWithDropout(), causal=True).findings
    assert "In train mode, a later token" in finding.message
