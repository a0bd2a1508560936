"""Inside `packed_weights` a model gives what it gives outside, and notices when a weight changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from saccade.nn import AttentionConfig, BlockConfig, Encoder, packed_weights
from saccade.nn._linear import Linear
from saccade.operator._products import FUNCTIONS, dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")


@pytest.fixture
def encoder():
    torch.manual_seed(3)
    config = BlockConfig(AttentionConfig(42, 7, bias=True), hidden=53, activation="gelu", norm="layer", bias=True)
    return Encoder(config, 2).eval()


def held(module):
    return [layer.product.copy.value is not None for layer in module.modules() if isinstance(layer, Linear)]


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_products_and_activations_are_the_same(activation):
    """float32 sums of 97 terms of size 1 in another order: 97 roundings of 6e-8."""
    torch.manual_seed(0)
    layer, x = Linear(97, 41), torch.randn(3, 5, 97)
    expected = layer(x), FUNCTIONS[activation](layer(x))
    with packed_weights(layer), torch.no_grad():
        got = layer(x), layer.activated(x, activation)
        assert held(layer) == [True]
    for a, b in zip(expected, got, strict=True):
        assert torch.allclose(a, b, atol=97 * 6e-8, rtol=1e-5)


def test_a_stack_uses_copies_inside_and_drops_them(encoder):
    x = torch.randn(2, 11, 42)
    expected = encoder(x)
    with packed_weights(encoder), packed_weights(encoder), torch.no_grad():
        assert torch.allclose(encoder(x), expected, atol=1e-5)
        assert all(held(encoder))
    assert not any(held(encoder))


def test_a_changed_weight_is_packed_anew(encoder):
    x, layer = torch.randn(2, 11, 42), encoder.blocks[0].feed_forward.down
    with packed_weights(encoder), torch.no_grad():
        before = encoder(x)
        layer.weight.mul_(3)
        after = encoder(x)
    assert not torch.allclose(before, after)
    with torch.no_grad():
        assert torch.allclose(after, encoder(x), atol=1e-5)


def test_gradients_hooks_copies_and_functions_get_plain_layers(encoder):
    x, seen = torch.randn(2, 11, 42), []
    with packed_weights(encoder):
        encoder(x).sum().backward()
        assert encoder.blocks[0].feed_forward.up.weight.grad is not None
        assert not any(held(encoder))
        encoder.blocks[0].feed_forward.up.register_forward_hook(lambda m, i, out: seen.append(out))
        with torch.no_grad():
            encoder(x)
            torch.func.vmap(encoder)(x[:, None])
        for twin in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder.blocks[1]))):
            assert not any(held(twin))
            assert all(layer.product.users == 0 for layer in twin.modules() if isinstance(layer, Linear))
    assert bool((seen[0] < -0.2).any())  # before the GELU, which is never below -.17
