"""`Score` in everything that reads a call's weights: statistics, weights of chosen rows, maps, steps, edits.

The function is no sum of score and bias, so nothing that adds a bias may pass for it.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import saccade
from saccade.inspection import step_of_call
from saccade.operator._checks import make_call
from saccade.operator._pooled import pooled
from saccade.see.analysis._scores import pair_weights
from saccade.see.viewer.maps._call import checked

B, HQ, HKV, LQ, LK, D = 2, 4, 2, 7, 11, 5
KINDS = ["program", "function"]


def inputs():
    torch.manual_seed(23)
    return [torch.randn(B, heads, length, D) for heads, length in ((HQ, LQ), (HKV, LK), (HKV, LK))]


def dense():
    """The logits of the formula, -inf where nothing is seen, and the weights: (B, Hq, Lq, Lk)."""
    query, key, _ = inputs()
    gains, where = captured()
    q, k = torch.arange(LQ)[:, None] + LK - LQ, torch.arange(LK)
    s = query @ key.repeat_interleave(HQ // HKV, 1).mT / D**0.5
    logits = s * s * gains[:, None, None] + where[:, None, None] * torch.sin(q + 2.0 * k)
    logits = logits.masked_fill((s > 1.0) | (k > q), -torch.inf)
    return logits, torch.softmax(logits, -1)


def captured():
    torch.manual_seed(29)
    return torch.rand(HQ), torch.randn(B, LK)


@pytest.fixture
def held():
    return captured()


@pytest.fixture(params=KINDS)
def bias(request, held):
    gains, where = held

    def function(s, b, h, q, k):
        square = s * s if request.param == "program" else torch.stack([s, s]).prod(0)
        return torch.where(s > 1.0, -torch.inf, square * gains[h] + where[b, k] * torch.sin(q + 2.0 * k))

    return saccade.Score(function)


def test_the_formula_hides_and_shows_more_than_one_key_of_each_row():
    logits, _ = dense()
    assert ((logits > -torch.inf).sum(-1) > 1).all() and (logits[..., :4] == -torch.inf).any()


def test_weights_of_chosen_rows_keys_and_heads(bias):
    query, key, _ = inputs()
    found = saccade.attention_weights(
        query, key, saccade.Causal(), bias=bias, rows=[5, 1], keys=[2, 0, 7], heads=[3, 1]
    )
    torch.testing.assert_close(found, dense()[1][:, [3, 1]][:, :, [5, 1]][..., [2, 0, 7]])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_statistics(bias, backend):
    query, key, value = inputs()
    found = saccade.statistics(query, key, saccade.Causal(), bias=bias, value=value, backend=backend)
    logits, weights = dense()
    entropy = -torch.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close(found.entropy, entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.largest, weights.amax(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(found.keys_seen, (logits > -torch.inf).sum(-1))


def test_maps_of_the_viewer_and_pooled_weights(bias):
    query, key, _ = inputs()
    logits, weights = dense()
    call = checked(query, key, mask=saccade.Causal(), bias=bias, scale=None, softcap=None, sink=None)
    for precise in (False, True):
        found = pooled(call, (1, 2), range(LQ), range(LK), (1, 1), None, precise=precise)
        torch.testing.assert_close(found.sums.float(), weights[1, 2], atol=1e-5, rtol=1e-5)
        assert torch.equal(found.counts > 0, logits[1, 2] > -torch.inf)


def test_pairs_of_one_text(bias):
    query, key, value = (tensor[:1] for tensor in inputs())
    weights = dense()[1]
    call = make_call(query, key, value, saccade.Causal(), bias=bias).observed(value, "by hand")
    rows, keys = torch.tensor([6, 0, 3]), torch.tensor([9, 2, 1])
    lse = torch.logsumexp(dense()[0][:1], -1)
    torch.testing.assert_close(pair_weights(call, lse, rows, keys), weights[0, :, rows, keys])


def test_steps_show_what_the_function_adds(bias):
    query, key, value = inputs()
    out = saccade.attention(query, key, value, saccade.Causal(), bias=bias)
    call = make_call(query, key, value, saccade.Causal(), bias=bias).observed(out, "by hand")
    steps = step_of_call(call, 2, 3, item=1, labels=list("abcdefghijk"))
    weights = dense()[1]
    np.testing.assert_allclose(steps.weights, weights[1, 2, 3], atol=1e-6)
    assert "Score" in str(steps)


class Model(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, query):
        return saccade.attention(query, *inputs()[1:], saccade.Causal(), bias=self.bias)


def test_kept_calls_own_what_the_function_captured(bias, held):
    model, query = Model(bias), inputs()[0]
    with saccade.watch(model, keep=True) as run:
        model(query)
    (kept,) = run.kept.values()
    for tensor in held:
        tensor.zero_()
    torch.testing.assert_close(kept.weights(head=1), dense()[1][:, 1], atol=1e-5, rtol=1e-5)


def test_edits_of_heads_read_the_changed_scores(bias):
    query, _, value = inputs()
    weights = dense()[1]
    plain = weights @ value.repeat_interleave(HQ // HKV, 1)

    model = Model(bias)
    with saccade.intervene(model, {0: saccade.intervention.Weights([2], lambda weights, call: weights * 0.5)}):
        found = model(query)
    expected = plain.clone()
    expected[:, 2] *= 0.5
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with (
        pytest.raises(ValueError, match=r"EditBias: Score\(a"),
        saccade.intervene(model, {0: saccade.intervention.EditBias([1], torch.zeros(LQ, LK))}),
    ):
        model(query)


def test_the_heads_that_pruning_leaves_keep_their_function():
    torch.manual_seed(31)
    gains = torch.rand(HQ)
    bias = saccade.Score(lambda s, b, h, q, k: s * s * gains[h])
    module = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=HQ))
    x = torch.randn(B, LQ, 16)
    with torch.no_grad():
        with saccade.intervene(module, {0: saccade.intervention.Ablate([0, 2])}):
            expected = module(x, saccade.Causal(), bias=bias)
        saccade.prune(module, {0: [0, 2]})
        torch.testing.assert_close(module(x, saccade.Causal(), bias=bias), expected)


def test_padding_on_the_left_moves_no_token_from_its_position():
    torch.manual_seed(37)
    where = torch.randn(HQ, LQ)
    bias = saccade.Score(lambda s, b, h, q, k: s * where[h, k] + where[h, q])
    module = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, heads=HQ))
    x, real = torch.randn(B, LQ, 16), torch.ones(B, LQ, dtype=torch.bool)
    real[1, :3] = False
    with torch.no_grad():
        found = module(x, saccade.Causal(), bias=bias, padding=saccade.Padding(real))
        torch.testing.assert_close(found[1:, 3:], module(x[1:, 3:], saccade.Causal(), bias=bias))
