"""Random calls in every dtype, layout, mask and bias on every instruction set, against the reference in float64.

The criterion is in fuzzing.py, what is drawn in drawing.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from native import drawing, fuzzing

pytest.importorskip("saccade._native", reason="this installation has no native build")

# One example is many: each has its own numbers, and runs on every set. The tensors are drawn from a seed.
rich = settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


@rich
@given(drawing.small_calls(), st.booleans())
def test_any_mask_expression(call, lse):
    fuzzing.check(call, lse)


@rich
@given(drawing.calls(), st.booleans())
def test_over_blocks_and_tails(call, lse):
    fuzzing.check(call, lse)


@pytest.mark.slow
@settings(rich, max_examples=150)
@given(drawing.calls(work=2**23), st.booleans())
def test_over_more_blocks(call, lse):
    fuzzing.check(call, lse)


@rich
@given(drawing.calls(), st.sampled_from(["expanded", "heads", "transposed", "unaligned"]))
def test_upstream_gradients_of_any_layout(call, layout):
    out, lse = call.cotangents()
    if layout == "expanded":
        out = out[..., :1].expand(out.shape)
    elif layout == "heads":
        out = out[:, :1].expand(out.shape)
    elif layout == "transposed":
        out = out.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    else:
        out = torch.cat([out.new_full((1,), torch.nan), out.flatten()])[1:].view(out.shape)
    fuzzing.check(call, True, [out, lse.mT.contiguous().mT])
