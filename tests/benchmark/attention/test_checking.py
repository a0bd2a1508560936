"""The check finds what is wrong, in the output and in each gradient, and only that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import oracle
from looped import looped
from saccade.benchmark.attention import Case, CaseInputs, DenseAttention, SaccadeAttention, SdpaAttention, checking
from saccade.benchmark.attention.checking import CaseJudge, chosen_rows, staged, written_out

CASE = Case(11, 17, "causal", "forward+backward", batch=2, heads=6, kv_heads=3, width=5, value_width=7)
MASKS = ["full", "causal", "window:5", "padding:half", "documents:3", "prefix:4", "causal+alibi", "bias+causal"]


@pytest.fixture
def few_rows(monkeypatch):
    """Every case counts as a large one."""
    monkeypatch.setattr(checking, "ALL_ROWS", 0)
    monkeypatch.setattr(checking, "SOME_ROWS", 0)


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_right_is_attention_by_its_definition(mask):
    inputs = CaseInputs.make(replace(CASE, mask=mask, stage="forward+backward", dtype="float64"))
    case = inputs.case
    seen = case.pattern.dense(case.sizes)
    bias = inputs.bias
    if mask == "causal+alibi":
        distance = (torch.arange(17) - (torch.arange(11)[:, None] + 6)).abs()
        bias = -inputs.bias[:, None, None].double() * distance
    truth = oracle.attend(*inputs.leaves, None if seen is None else seen.numpy(), bias=bias)
    gradients = torch.autograd.grad(truth.out, inputs.leaves, inputs.upstream)
    found = written_out(inputs, torch.arange(11), torch.float64)
    for name, right in zip(("out", "d_query", "d_key", "d_value"), (truth.out.detach(), *gradients), strict=True):
        torch.testing.assert_close(found[name], right, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@looped("mask", MASKS)
@looped("stage", ["forward", "recorded", "backward"])
@looped("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_right_passes(mask, stage, dtype):
    inputs = CaseInputs.make(replace(CASE, mask=mask, stage=stage, dtype=dtype))
    judge = CaseJudge.of(inputs)
    for contender in (SaccadeAttention("auto"), SaccadeAttention("chunked"), SdpaAttention(), DenseAttention()):
        verdict = judge.verdict(contender.forward(inputs))
        assert verdict.right, (contender.name, verdict)


def test_rows_that_see_nothing_are_zero():
    inputs = CaseInputs.make(replace(CASE, mask="window:2+padding:0.25"))
    case = inputs.case
    first, stop = case.pattern.ranges(case.sizes)
    empty = (stop <= first).expand(2, -1)
    assert empty.any()
    assert not empty.all()
    judge = CaseJudge.of(inputs)
    assert (judge.truth["out"].transpose(1, 2)[empty] == 0).all()
    assert judge.verdict(SaccadeAttention("chunked").forward(inputs)).right


class Bent(torch.autograd.Function):
    """The identity, with something added to the gradient at one entry."""

    @staticmethod
    def forward(ctx, tensor, at):
        ctx.at = at
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, upstream):
        bent = upstream.clone()
        bent[ctx.at] += 0.01
        return bent, None


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
@looped("which", range(3))
@looped("place", [(0, 0, 0, 0), (1, 2, 5, 3), (-1, -1, -1, -1)])
def test_one_wrong_entry_of_a_gradient_is_found_though_few_rows_are_computed(which, place):
    inputs = CaseInputs.make(replace(CASE, length_q=17))
    right = DenseAttention().forward(inputs)
    assert CaseJudge.of(inputs).verdict(right).right

    def wrong():
        leaves = [*inputs.leaves]
        leaves[which] = Bent.apply(leaves[which], place)
        return DenseAttention().forward(replace(inputs, query=leaves[0], key=leaves[1], value=leaves[2]))()

    verdict = CaseJudge.of(inputs).verdict(wrong)
    assert not verdict.right
    assert verdict.worst == ("d_query", "d_key", "d_value")[which]
    assert verdict.rows < 17


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), id="no mask"),
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2), id="scale"),
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k.roll(1, 1), v, is_causal=True), id="heads"),
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * 1.00001, id="bits"),
        pytest.param(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * torch.nan, id="NaN"),
    ],
)
def test_a_wrong_output_is_found(wrong):
    inputs = CaseInputs.make(Case(17, 17, "causal", heads=3, kv_heads=3, width=13, value_width=13))
    judge = CaseJudge.of(inputs)
    assert judge.verdict(SdpaAttention().forward(inputs)).right
    verdict = judge.verdict(lambda: wrong(*inputs.leaves))
    assert not verdict.right
    assert verdict.worst == "out"


def test_a_sloppier_dtype_is_allowed_what_it_needs_and_no_more():
    case = Case(17, 17, "causal", heads=3, kv_heads=3, width=13, value_width=13)
    fine, coarse = (CaseJudge.of(CaseInputs.make(replace(case, dtype=dtype))) for dtype in ("float32", "bfloat16"))
    ratio = coarse.allowed["out"] / fine.allowed["out"]
    assert 2**12 < ratio < 2**20  # 2^16 between the units in the last place


@pytest.mark.usefixtures("few_rows")
def test_a_long_case_is_checked_at_some_rows_with_both_ends():
    rows = chosen_rows(CaseInputs.make(Case(300, 300, width=3, value_width=3)))
    assert len(rows) == 8
    assert rows[0] == 0
    assert rows[-1] == 299


def test_a_small_case_is_checked_at_all_rows():
    assert torch.equal(chosen_rows(CaseInputs.make(CASE)), torch.arange(11))


@looped("stage", ["forward", "recorded", "backward", "forward+backward", "decode"])
def test_a_stage_repeats_what_it_says(stage):
    inputs = CaseInputs.make(replace(CASE, stage=stage))
    made = []

    def forward():
        made.append(torch.is_grad_enabled())
        return DenseAttention().forward(inputs)()

    call = staged(forward, inputs)
    results = [call(), call()]
    expected = {"forward": [False] * 2, "decode": [False] * 2, "backward": [True]}.get(stage, [True] * 2)
    assert made == expected
    for result in results:
        if stage in ("backward", "forward+backward"):
            assert [gradient.shape for gradient in result] == [leaf.shape for leaf in inputs.leaves]
        else:
            assert result.shape == inputs.upstream.shape
            assert result.requires_grad == (stage == "recorded")
