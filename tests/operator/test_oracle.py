"""The judge is judged first: by PyTorch where the contracts agree, by finite differences, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oracle
import problems
from problems import assert_close


def test_worked_example_by_hand():
    # Q = [1, 0], K = I, V = [[10, 20], [30, 40]], d_k = 2: weights 1 / (1 + exp(-1 / sqrt 2)) and the rest.
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    key = torch.eye(2, dtype=torch.float64)[None, None]
    value = torch.tensor([[[[10.0, 20.0], [30.0, 40.0]]]], dtype=torch.float64)
    found = oracle.attend(query, key, value)
    first = 1 / (1 + math.exp(-(2**-0.5)))
    assert found.weights.flatten().tolist() == pytest.approx([first, 1 - first], abs=1e-15)
    assert found.out.flatten().tolist() == pytest.approx([16.604769, 26.604769], abs=1e-6)
    assert found.lse.item() == pytest.approx(math.log(math.exp(2**-0.5) + 1), abs=1e-15)


def test_agrees_with_pytorch_where_the_contracts_agree():
    named = problems.tensors()
    bias = torch.randn(11, 13, dtype=torch.float64)
    want = F.scaled_dot_product_attention(**named, attn_mask=bias, enable_gqa=True, scale=0.3)
    assert_close(oracle.attend(*named.values(), bias=bias, scale=0.3).out, want)
    bits = oracle.causal(11, 13)
    want = F.scaled_dot_product_attention(**named, attn_mask=torch.from_numpy(bits), enable_gqa=True)
    assert_close(oracle.attend(*named.values(), bits).out, want)


@pytest.mark.parametrize("name", ["softcap", "sink_with_empty_rows", "bias_with_hidden_pairs"])
def test_gradients_against_finite_differences(name):
    problem = problems.CASES[name]()
    # finite differences cannot cross -inf: leave the bias alone
    moving = {
        k: t[:1].clone().requires_grad_() if k != "sink" else t for k, t in problem.tensors.items() if k != "bias"
    }
    still = {k: t for k, t in problem.tensors.items() if k not in moving}
    problem.see = None if problem.see is None else np.asarray(problem.see)[:1]
    if "bias" in still:
        still["bias"] = still["bias"][:1]

    def loss(*given):
        found = problem.truth(dict(zip(moving, given, strict=True)) | still)
        finite = torch.isfinite(found.lse.detach())
        return (found.out**2).sum() + (torch.where(finite, found.lse, 0.0) ** 2).sum()

    given = list(leaf for leaf in problems.leaves(moving).values())
    assert torch.autograd.gradcheck(loss, given, fast_mode=True)


def test_empty_rows_by_definition():
    found = problems.CASES["tall_causal_has_empty_rows"]().truth()
    assert (found.out[:, :, :4] == 0).all() and (found.lse[:, :, :4] == -math.inf).all()
    assert torch.isfinite(found.lse[:, :, 4:]).all() and (found.weights.sum(-1)[:, :, 4:] - 1).abs().max() < 1e-14
    with_sink = problems.CASES["sink_with_empty_rows"]()
    lse = with_sink.truth().lse[:, :, :4]
    assert torch.equal(lse, with_sink.tensors["sink"][None, :, None].expand_as(lse))


def test_poison_it_may_not_see_does_not_reach_it():
    problem = problems.CASES["wide_causal"]()
    clean = problem.truth().out
    problem.tensors["value"][:, :, -1] = math.nan
    problem.tensors["key"][:, :, -1] = math.inf
    out = problem.truth().out
    assert torch.equal(out[:, :, :-1], clean[:, :, :-1]) and out[:, :, -1].isnan().all()
