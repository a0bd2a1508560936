"""Multi-head attention against PyTorch's, with copied weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from saccade import Causal
from saccade.nn import LayerCache, MultiHeadAttention
from saccade.positions import Rotary

B, L, WIDTH, HEADS = 2, 7, 15, 3


def test_is_torch_multihead_attention_with_the_same_weights():
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(theirs.in_proj_bias)
    torch.nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention(WIDTH, HEADS, bias=True).double()
    ours.load_state_dict(
        {
            "projection.weight": theirs.in_proj_weight,
            "projection.bias": theirs.in_proj_bias,
            "output.weight": theirs.out_proj.weight,
            "output.bias": theirs.out_proj.bias,
        }
    )
    x = torch.randn(B, L, WIDTH, dtype=torch.float64, requires_grad=True)
    ignored = torch.ones(L, L, dtype=torch.bool).triu(1)
    expected, _ = theirs(x, x, x, attn_mask=ignored, need_weights=False)
    out = ours(x, Causal())
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    (theirs_grad,) = torch.autograd.grad(expected, x, cotangent)
    (ours_grad,) = torch.autograd.grad(out, x, cotangent)
    torch.testing.assert_close(ours_grad, theirs_grad)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_query_head_reads_its_group(kv_heads):
    heads, width = 6, 30
    d = width // heads
    module = MultiHeadAttention(width, heads, kv_heads=kv_heads).double()
    x = torch.randn(B, L, width, dtype=torch.float64)
    q, k, v = module.projection.weight.split([width, kv_heads * d, kv_heads * d])
    outs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        rows, shared = slice(head * d, (head + 1) * d), slice(group * d, (group + 1) * d)
        outs.append(F.scaled_dot_product_attention(x @ q[rows].T, x @ k[shared].T, x @ v[shared].T))
    torch.testing.assert_close(module(x), torch.cat(outs, dim=-1) @ module.output.weight.T)


def test_without_positions_and_mask_it_is_permutation_equivariant():
    module = MultiHeadAttention(WIDTH, HEADS).double()
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    order = torch.randperm(L)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order])


def test_observer_sees_what_goes_into_attention():
    module = MultiHeadAttention(20, 5, kv_heads=1, rotary=Rotary(4)).double()
    x = torch.randn(B, L, 20, dtype=torch.float64)
    seen = []
    out = module(x, Causal(), observe=lambda *arguments: seen.append(arguments))
    ((query, key, value, mask),) = seen
    assert (query.shape, key.shape, value.shape) == ((B, 5, L, 4), (B, 1, L, 4), (B, 1, L, 4))
    assert mask == Causal()
    again = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(module.output(again.transpose(1, 2).flatten(2)), out)


def test_dropout_acts_in_training_only():
    module = MultiHeadAttention(WIDTH, HEADS, dropout=0.5)
    x = torch.randn(B, L, WIDTH)
    trained = module(x)
    module.eval()
    assert torch.equal(module(x), module(x))
    assert not torch.allclose(trained, module(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiHeadAttention(16, 3), "heads: must divide the width, got heads=3 and width=16"),
        (lambda: MultiHeadAttention(16, 0), "heads: must divide the width, got heads=0"),
        (lambda: MultiHeadAttention(16, 4, kv_heads=3), "kv_heads: must divide the heads, got kv_heads=3 and heads=4"),
        (lambda: MultiHeadAttention(16, 4, rotary=Rotary(6)), "rotary: heads are 4 wide, but it turns 6 features"),
        (
            lambda: MultiHeadAttention(16, 4)(torch.zeros(2, 16)),
            r"x: expected shape \(batch, length, 16\), got \(2, 16\)",
        ),
        (lambda: MultiHeadAttention(16, 4)(torch.zeros(2, 3, 15)), r"got \(2, 3, 15\)"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_cache_of_another_batch_is_refused():
    module, cache = MultiHeadAttention(WIDTH, HEADS), LayerCache()
    module(torch.randn(2, L, WIDTH), Causal(), cache=cache)
    with pytest.raises(ValueError, match=r"cache: it holds keys of .*\(2, 3, 5\), but new ones of \(1, 3, 5\)"):
        module(torch.randn(1, 1, WIDTH), Causal(), cache=cache)
    assert cache.length == L
