"""Masks as a target's own argument takes them, and outputs of the shape that was expected."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade.verification import MaskReading, Reading, TargetError
from saccade.verification.subject._calling import mask_tensor
from saccade.verification.subject._inputs import NamedInputs
from saccade.verification.subject._reading import Hints, Promise
from saccade.verification.subject._subject import Subject
from saccade.verification.subject.discovery._discover import discover

ATTEND = torch.tensor([[True, False, True], [True, True, False]])[None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_of_floats_has_the_dtype_of_the_inputs(dtype):
    inputs = NamedInputs({"query": torch.zeros(1, 1, 2, 5, dtype=dtype), "key": torch.zeros(1, 1, 3, 5, dtype=dtype)})
    seen = mask_tensor(MaskReading("mask", "QK", "ignore", "float32"), ATTEND, inputs)
    torch.testing.assert_close(seen, torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=dtype), rtol=0, atol=0)
    added = mask_tensor(MaskReading("mask", "QK", "additive"), ATTEND, inputs)
    assert added.dtype == dtype
    assert torch.equal(added == 0, ATTEND[0, 0])


def gives_query(q, k, v):
    return q


@pytest.mark.parametrize("layout", ["BHLD", "BLHD", "BLD", "LD"])
def test_an_output_of_another_width_than_the_values_is_refused(layout):
    subject = Subject(gives_query, Reading("attention", layout, 7, heads=1, value_width=5))
    with pytest.raises(TargetError, match="its output has the width 7 where the values' 5 was expected"):
        subject(subject.inputs(2, 3))


def test_what_gives_its_query_is_verified_to_the_end():
    subject = discover(gives_query, Hints(), Promise())
    assert subject.reading.value_width is None
    report = saccade.verify(gives_query, isolated=False, checks=["scale", "softmax", "causal-leak", "mixing"])
    assert not any("broke off" in finding.message for finding in report.findings), str(report)
