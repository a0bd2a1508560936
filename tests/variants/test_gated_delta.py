"""The gated delta rule: chunks, steps and the published formula are one function, in values and gradients.

Shape legend: B batch, Hq / Hkv query and key-value heads, L length, D key width, Dv value width.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from looped import looped
from saccade import Causal, Padding, Window
from saccade.variants import (
    DeltaState,
    GatedDeltaConfig,
    HeadSizes,
    gated_delta_rule,
    gated_delta_step,
    linear_attention,
)

NEAR = 1e-12  # of the largest entry: some hundred float64 products in another order, through a triangular system


def inputs(length, batch=2, heads=6, kv_heads=3, width=7, value_width=5, dtype=torch.float64):
    """Query, key, value, beta and log_alpha; keys of length 1, beta from 0 to 2, alpha from .2 to 1."""
    torch.manual_seed(length + heads)
    query = torch.randn(batch, heads, length, width, dtype=dtype)
    key = F.normalize(torch.randn(batch, kv_heads, length, width, dtype=dtype), dim=-1)
    value = torch.randn(batch, kv_heads, length, value_width, dtype=dtype)
    beta, alpha = (torch.rand(batch, kv_heads, length, dtype=dtype) for _ in range(2))
    return tuple(x.requires_grad_() for x in (query, key, value, 2 * beta, (0.2 + 0.8 * alpha).log()))


def formula(query, key, value, beta, log_alpha):
    """S_t = alpha_t S_(t-1) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t, as they are printed."""
    group, (batch, kv_heads, length, width) = query.shape[1] // key.shape[1], key.shape
    items = []
    for b in range(batch):
        for head in range(kv_heads):
            state, rows = torch.zeros(value.shape[-1], width, dtype=query.dtype), []
            for t in range(length):
                k, v, s = key[b, head, t], value[b, head, t], beta[b, head, t]
                alpha = 1 if log_alpha is None else log_alpha[b, head, t].exp()
                kept = torch.eye(width, dtype=k.dtype) - s * torch.outer(k, k)
                state = alpha * state @ kept + s * torch.outer(v, k)
                rows.append(query[b, head * group : (head + 1) * group, t] @ state.T)
            items.append(torch.stack(rows, 1))
    return torch.stack(items).reshape(batch, -1, length, value.shape[-1])


def by_steps(sizes):
    """The same, by calls that carry a state on."""

    def read(*tensors):
        state, outs = None, []
        for part in zip(*(x.split(sizes, 2) for x in tensors), strict=True):
            out, state = gated_delta_step(*part, state)
            outs.append(out)
        return torch.cat(outs, 2)

    return read


def assert_same(function, tensors):
    """Values, and gradients of every input for a random cotangent."""
    out, expected = function(*tensors), formula(*tensors)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, tensors, cotangent)
    wanted = torch.autograd.grad(expected, tensors, cotangent)
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= NEAR * other.abs().max().clamp(min=1)


@looped("length", [2, 3, 61, 64, 67, 131])
def test_chunks_are_the_formula(length):
    assert_same(lambda *x: gated_delta_rule(*x, Causal()), inputs(length))


def test_without_alpha_it_is_the_delta_rule():
    *tensors, _ = inputs(71)
    out = gated_delta_rule(*tensors, None, Causal())
    torch.testing.assert_close(out, formula(*tensors, None), rtol=0, atol=1e-12)
    ones = torch.zeros_like(tensors[3])
    torch.testing.assert_close(out, gated_delta_rule(*tensors, ones, Causal()), rtol=0, atol=0)


@pytest.mark.slow
@looped("sizes", [[1] * 67, [1, 1, 64, 1], [13, 53, 1]])
def test_steps_are_the_formula(sizes):
    assert_same(by_steps(sizes), inputs(67))


@looped("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@looped("length", [1, 131])
def test_it_is_the_rule_of_transformers(theirs, length):
    """Theirs is in float32, divides queries by sqrt(D), and has more value heads than key heads."""
    width, value_width = 13, 11
    query, key, value, beta, log_alpha = inputs(length, 2, 3, 3, width, value_width, torch.float32)
    given = (x.transpose(1, 2) for x in (query * width**0.5, key, value, log_alpha, beta))
    out, state = theirs(*given, output_final_state=True, use_qk_l2norm_in_kernel=False)
    wide = [x.double() for x in (query, key, value, beta, log_alpha)]
    expected, expected_state = gated_delta_step(*wide)
    torch.testing.assert_close(out.transpose(1, 2).double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    torch.testing.assert_close(state.double(), expected_state.memory, rtol=0, atol=1e-5)


def test_the_module_is_the_layer_of_transformers():
    """Its gates too: beta and g as Qwen3-Next computes them, and keys of length 1."""
    torch.manual_seed(3)
    sizes = HeadSizes(width=17, heads=3, kv_heads=3, head=13, value_head=11)
    module = GatedDeltaConfig().build(sizes)
    query, key, value, *_ = inputs(37, 2, 3, 3, 13, 11, torch.float32)
    tokens = torch.randn(2, 37, 17)
    g = -module.log_rate.exp() * F.softplus(tokens @ module.alpha.weight.T + module.alpha.bias)
    beta = (tokens @ module.beta.weight.T).sigmoid()
    given = (x.transpose(1, 2) for x in (query, 5 * key, value))
    expected, _ = torch_chunk_gated_delta_rule(*given, g, beta, use_qk_l2norm_in_kernel=True)
    out = module(query, 5 * key, value, Causal(), tokens=tokens)
    torch.testing.assert_close(out.transpose(1, 2), expected * 13**0.5, rtol=1e-4, atol=1e-5)


def test_orthonormal_keys_make_it_linear_attention():
    """Nothing stands at a new key: beta k k^T vanishes on the state, and values are beta v."""
    query, _, value, beta, _ = inputs(7, heads=3, width=11)
    key = torch.linalg.qr(torch.randn(2, 3, 11, 7, dtype=torch.float64)).Q.mT
    out = gated_delta_rule(query, key, value, beta, None, Causal())
    scaled = beta[..., None] * value
    added = linear_attention(query, key, scaled, Causal(), feature_map=lambda x: x, normalise=False)
    torch.testing.assert_close(out, added, rtol=0, atol=1e-13)


def test_a_memory_is_overwritten_exactly():
    """With beta = 1 and keys of length 1, a key reads the value written to it last, whatever stood there."""
    places = torch.tensor([0, 1, 2, 1, 0, 0, 2, 1] * 11 + [2])  # longer than a chunk
    key = torch.eye(3)[places][None, None]
    value, beta = torch.randint(-9, 9, (1, 1, len(places), 5)).float(), torch.ones(1, 1, len(places))  # no rounding
    assert torch.equal(gated_delta_rule(key, key, value, beta, None, Causal()), value)
    _, state = gated_delta_step(key, key, value, beta, None)
    last = [int((places == place).nonzero()[-1]) for place in range(3)]
    assert torch.equal(state.memory[0, 0], value[0, 0, last])


def test_an_alpha_of_zero_forgets_everything():
    query, key, value, beta, log_alpha = (x.detach() for x in inputs(83))
    log_alpha[:, :, 41] = -torch.inf
    leaves = [x.requires_grad_() for x in (query, key, value, beta, log_alpha)]
    out = gated_delta_rule(*leaves, Causal())
    alone = gated_delta_rule(*(x[:, :, 41:] for x in leaves), Causal())
    torch.testing.assert_close(out[:, :, 41:], alone, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(out[:, :, 41:].square().sum(), leaves)
    assert all(torch.isfinite(x).all() and (x[:, :, :41] == 0).all() for x in gradients)


@looped("fill", [float("nan"), float("inf")])
@looped("which", range(5))
def test_what_stands_later_changes_no_earlier_row(fill, which):
    clean = [x.detach() for x in inputs(73)]
    dirty = [x.clone() for x in clean]
    dirty[which][:, :, 50] = fill
    out, expected = gated_delta_rule(*dirty, Causal()), gated_delta_rule(*clean, Causal())
    assert torch.equal(out[:, :, :50], expected[:, :, :50])
    assert out[:, :, 50].isnan().all()
    assert out[:, :, 51:].isnan().all() == (which != 0)  # a query is read by nobody else


def test_padded_tokens_leave_the_state_as_it_is():
    tensors = [x.detach() for x in inputs(67)]
    for x in tensors:
        x[0, :, 31:] = float("nan")
    mask = Padding([31, 67], queries=[31, 67])
    out, state = gated_delta_step(*tensors, mask=mask)
    alone, expected = gated_delta_step(*(x[:1, :, :31] for x in tensors))
    torch.testing.assert_close(out[:1, :, :31], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.memory[:1], expected.memory, rtol=0, atol=1e-12)
    assert (out[0, :, 31:] == 0).all()


@looped(
    ("change", "error", "words"),
    [
        ({"mask": None}, ValueError, "takes Causal(), alone or with Padding(...), since each token corrects"),
        ({"mask": Window(3, 0)}, ValueError, "mask: the gated delta rule takes Causal(), Padding(...) and both"),
        ({"beta": 0.5}, TypeError, "beta: expected a tensor (batch, kv heads, length), got float"),
        ({"beta": torch.ones(2, 6, 5)}, ValueError, "beta: expected floating-point numbers of shape (2, 3, 5)"),
        ({"log_alpha": torch.ones(2, 3, 5, 1)}, ValueError, "got (2, 3, 5, 1) in torch.float32"),
        ({"query": torch.ones(2, 6, 4, 7).double()}, ValueError, "query has length (axis 2) 4, expected key's 5"),
    ],
)
def test_errors(change, error, words):
    names = ("query", "key", "value", "beta", "log_alpha")
    given = {**dict(zip(names, inputs(5), strict=True)), "mask": Causal(), **change}
    with pytest.raises(error, match=re.escape(words)):
        gated_delta_rule(**given)


@looped(
    ("change", "error", "words"),
    [
        ({"mask": Causal()}, ValueError, "mask: expected None or Padding(...), since a step is causal already"),
        ({"state": torch.ones(2, 3, 7, 5)}, TypeError, "state: expected the DeltaState of an earlier step or None"),
        ({"state": DeltaState(torch.ones(2, 3, 5, 7))}, ValueError, "expected memory of shape (2, 3, 7, 5)"),
        ({"state": DeltaState(torch.ones(2, 3, 7, 5))}, ValueError, "expected memory in torch.float64 for these"),
    ],
)
def test_errors_of_a_step(change, error, words):
    with pytest.raises(error, match=re.escape(words)):
        gated_delta_step(*inputs(5), **change)


def test_the_configuration_and_the_tokens_are_checked():
    with pytest.raises(TypeError, match="fading: expected True or False, got 1"):
        GatedDeltaConfig(1)
    module, x = GatedDeltaConfig().build(HeadSizes(8, 2, 2, 4, 4)), torch.ones(1, 2, 5, 4)
    with pytest.raises(TypeError, match="tokens: the gated delta rule needs the tokens that its queries"):
        module(x, x, x, Causal())
