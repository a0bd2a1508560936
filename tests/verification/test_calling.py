"""Masks as a target's own argument takes them."""

from __future__ import annotations

import pytest
import torch

from saccade.verification import MaskReading
from saccade.verification._calling import mask_tensor
from saccade.verification._inputs import Inputs

ATTEND = torch.tensor([[True, False, True], [True, True, False]])[None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_of_floats_has_the_dtype_of_the_inputs(dtype):
    inputs = Inputs({"query": torch.zeros(1, 1, 2, 5, dtype=dtype), "key": torch.zeros(1, 1, 3, 5, dtype=dtype)})
    seen = mask_tensor(MaskReading("mask", "QK", "ignore", "float32"), ATTEND, inputs)
    torch.testing.assert_close(seen, torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=dtype), rtol=0, atol=0)
    added = mask_tensor(MaskReading("mask", "QK", "additive"), ATTEND, inputs)
    assert added.dtype == dtype
    assert torch.equal(added == 0, ATTEND[0, 0])
