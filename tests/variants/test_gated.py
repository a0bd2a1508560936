"""Gated attention against its formula, and against the gate that every attention module may have."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import saccade
from looped import looped
from saccade import Causal, Padding
from saccade.nn import AttentionConfig, MultiHeadAttention
from saccade.positions import RotaryConfig
from saccade.variants import GatedConfig, HeadSizes, gated_attention

B, L, WIDTH, HEADS, KV = 3, 11, 24, 6, 2
OPTIONS = dict(scale=0.4, softcap=2.0, sink=True, positions=RotaryConfig(), kv_heads=KV)


@pytest.mark.parametrize("width", [13, 1], ids=["elementwise", "headwise"])
def test_the_formula_and_all_its_gradients(width):
    sizes = [(B, HEADS, 5, 7), (B, KV, L, 7), (B, KV, L, 13), (B, HEADS, 5, width)]
    given = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]
    query, key, value, gate = given
    out = gated_attention(*given, Causal(), softcap=3.0)
    plain = saccade.attention(query, key, value, Causal(), softcap=3.0, backend="reference")
    expected = plain / (1 + torch.exp(-gate))
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, given, cotangent), torch.autograd.grad(expected, given, cotangent)
    )


@looped("options", [{}, OPTIONS])
@looped("padding", [None, Padding([7, 11, 4])])
def test_elementwise_is_the_gate_of_every_attention_module(options, padding):
    built_in = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, gate=True, **options)).double()
    ours = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=GatedConfig(), **options)).double()
    state = built_in.state_dict()
    ours.load_state_dict({"mechanism.gate.weight" if n == "gate.weight" else n: p for n, p in state.items()})
    results = []
    for module in (built_in, ours):
        x = torch.linspace(-1, 2, B * L * WIDTH, dtype=torch.float64).sin().view(B, L, WIDTH).requires_grad_()
        out = module(x, Causal(), padding=padding)
        out.square().sum().backward()
        gate = module.gate if module is built_in else module.mechanism.gate
        results.append((out, x.grad, gate.weight.grad, module.projection.weight.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_headwise_is_one_number_for_each_head():
    config = AttentionConfig(WIDTH, HEADS, mechanism=GatedConfig(headwise=True))
    module, x = MultiHeadAttention(config), torch.randn(B, L, WIDTH)
    assert module.mechanism.gate.weight.shape == (HEADS, WIDTH)
    plain = MultiHeadAttention(AttentionConfig(WIDTH, HEADS))
    plain.load_state_dict({n: p for n, p in module.state_dict().items() if "mechanism" not in n})
    given = []
    plain.output.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    plain(x)
    gates = F.linear(x, module.mechanism.gate.weight).sigmoid().repeat_interleave(WIDTH // HEADS, -1)
    torch.testing.assert_close(module(x), module.output(given[0] * gates))


def test_the_gate_starts_by_fan_in():
    torch.manual_seed(0)
    weight = GatedConfig().build(HeadSizes(256, 4, 4, 64, 64)).gate.weight
    assert weight.shape == (256, 256)
    assert abs(weight.std() * 16 - 1) < 5 / (2 * 256 * 256) ** 0.5  # five standard errors


def test_what_does_not_fit_is_named():
    query, key, value = torch.randn(B, 4, 5, 7), torch.randn(B, 2, 6, 7), torch.randn(B, 2, 6, 3)
    with pytest.raises(ValueError, match=r"gate: expected shape \(3, 4, 5, 3\), or 1 as.*got \(3, 4, 5, 2\)"):
        gated_attention(query, key, value, torch.zeros(B, 4, 5, 2))
    with pytest.raises(ValueError, match=r"gate: expected shape .*got \(3, 2, 5, 3\)"):
        gated_attention(query, key, value, torch.zeros(B, 2, 5, 3))
    with pytest.raises(TypeError, match="gate: expected a tensor, got float"):
        gated_attention(query, key, value, 0.5)
    with pytest.raises(TypeError, match="headwise: expected True or False, got 1"):
        GatedConfig(1)
    with pytest.raises(
        TypeError, match="tokens: gated attention needs the tokens that its queries were projected from"
    ):
        GatedConfig().build(HeadSizes(8, 4, 2, 7, 3))(query, key, value)


@pytest.mark.parametrize("width", [7, 1], ids=["elementwise", "headwise"])
def test_the_gate_of_padded_rows_is_not_read(width):
    sizes = [(B, HEADS, L, 5), (B, KV, L, 5), (B, KV, L, 7), (B, HEADS, L, width)]
    given = [torch.randn(*size, dtype=torch.float64) for size in sizes]
    lengths, cotangent = [7, L, 0], torch.randn(B, HEADS, L, 7, dtype=torch.float64)
    padding, results = Padding(lengths, queries=lengths), []
    for poison in (0.0, float("nan"), float("inf")):
        leaves, upstream = [x.clone() for x in given], cotangent.clone()
        for x in (*leaves, upstream):
            for item, length in enumerate(lengths):
                x[item, :, length:] = poison
        leaves = [x.requires_grad_() for x in leaves]
        out = gated_attention(*leaves, Causal() & padding)
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    assert (results[0][0][0, :, 7:] == 0).all() and (results[0][0][1] != 0).any()
    for poisoned in results[1:]:
        assert all(torch.equal(mine, clean) for mine, clean in zip(poisoned, results[0], strict=True))
