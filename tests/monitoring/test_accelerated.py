"""Watched and accelerated at once, whichever is inside: all of it accelerated, every call seen once, numbers right.

Shape legend: B batch, H heads, L length, D width.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from attention_numbers import check, dense
from saccade.operator._backends.native import _kernels

pytestmark = pytest.mark.skipif(_kernels.module is None, reason="the compiled kernels are not there")

B, H, L, D = 2, 5, 131, 16
E = H * D
REAL = torch.arange(L) < torch.tensor([L, 101])[:, None]


def both(model, run, order):
    """The watch, the acceleration and the output of one forward under both."""
    seen, fast = saccade.watch(model, gradients=torch.is_grad_enabled()), saccade.accelerate()
    first, second = (fast, seen) if order == "watch inside" else (seen, fast)
    with first, second:
        out = run(model)
        if out.requires_grad:
            (out * REAL[..., None]).pow(2).sum().backward()
    return seen, fast, out


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(E, 3 * E)

    def parts(self, x):
        return [part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.projection(x).chunk(3, -1)]

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.parts(x), REAL[:, None, None]).transpose(1, 2).flatten(2)


ORDERS = pytest.mark.parametrize("order", ["watch inside", "accelerate inside"])


@ORDERS
def test_scaled_dot_product_attention(order):
    model, x = Calls(), torch.randn(B, L, E)
    with saccade.watch(model, gradients=True) as alone:
        plain = model(x)
        (plain * REAL[..., None]).pow(2).sum().backward()
    seen, fast, out = both(model, lambda m: m(x), order)
    assert (fast.taken, fast.calls) == (1, 1)
    assert [call.name for call in seen.calls] == [""] and not seen.unobserved
    query, key, _ = model.parts(x)
    check(seen, "", dense(query, key, REAL[:, None, None]), counted=REAL[:, None])
    torch.testing.assert_close(out, plain)
    for head, statistics in alone.aggregates[""].items():
        for name in ("query", "key", "value", "out"):
            other = seen.aggregates[""][head][f"{name}.gradient"]
            assert other.mean == pytest.approx(statistics[f"{name}.gradient"].mean, rel=1e-4)


@ORDERS
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(order, need_weights):
    layer, x = nn.MultiheadAttention(E, H, batch_first=True), torch.randn(B, L, E)

    def run(model):
        return model(x, x, x, key_padding_mask=~REAL, need_weights=need_weights)[0]

    plain = run(layer)
    seen, fast, out = both(layer, run, order)
    # With weights PyTorch forms them itself, and there is nothing to accelerate; they are seen all the same.
    assert (fast.taken, fast.calls) == (0 if need_weights else 1, 1)
    assert [call.name for call in seen.calls] == [""] and not seen.unobserved
    query, key, _ = (
        part.unflatten(-1, (H, D)).transpose(1, 2)
        for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    )
    check(seen, "", dense(query, key, REAL[:, None, None]), counted=REAL[:, None])
    torch.testing.assert_close(out[REAL], plain[REAL])


@ORDERS
def test_an_encoder_in_eval(order):
    layer = nn.TransformerEncoderLayer(E, H, 17, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), torch.randn(B, L, E)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=~REAL)
        seen, fast, out = both(model, lambda m: m(x, src_key_padding_mask=~REAL), order)
    assert (fast.taken, fast.calls) == (3, 3)
    assert [call.layer for call in seen.calls] == [0, 1, 2] and not seen.unobserved
    assert (plain - out)[REAL].abs().max() < 1e-5
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


@ORDERS
def test_a_model_of_transformers(order):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": E, "num_attention_heads": H, "num_key_value_heads": H, "intermediate_size": 17}
    config = transformers.LlamaConfig(**small, num_hidden_layers=2, vocab_size=23, attn_implementation="sdpa")
    model, ids = transformers.LlamaModel(config).eval(), torch.randint(0, 23, (B, L))
    with torch.no_grad():
        plain = model(ids, attention_mask=REAL.long()).last_hidden_state
        with saccade.watch(model) as alone:
            model(ids, attention_mask=REAL.long())
        seen, fast, out = both(model, lambda m: m(ids, attention_mask=REAL.long()).last_hidden_state, order)
    assert (fast.taken, fast.calls) == (2, 2)
    assert [call.name for call in seen.calls] == ["layers.0.self_attn", "layers.1.self_attn"] and not seen.unobserved
    assert (plain - out)[REAL].abs().max() < 1e-4
    for name, heads in alone.aggregates.items():
        for head, statistics in heads.items():
            assert seen.aggregates[name][head]["entropy"].mean == pytest.approx(statistics["entropy"].mean, rel=1e-4)
            assert seen.aggregates[name][head]["entropy"].count == statistics["entropy"].count
