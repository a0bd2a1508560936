"""PyTorch's own modules: nn.MultiheadAttention, nn.TransformerEncoder and nn.TransformerDecoder.

B batch, L length, E width.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import saccade
from saccade.acceleration._answers import _WEIGHTS

B, L, E = 3, 7, 12


@pytest.fixture
def x():
    return torch.randn(B, L, E)


@pytest.fixture
def padded():
    """True = ignore."""
    return torch.arange(L)[None] >= torch.tensor([7, 4, 5])[:, None]


def off_by(ours, plain, exact):
    """Ours is at most twice as far from float64 as PyTorch's, and a bit."""
    ours, plain, exact = ours.detach(), plain.detach(), exact.detach()
    theirs = float((plain.double() - exact).abs().max())
    bit = torch.finfo(plain.dtype).eps * float(exact.abs().max())
    return float((ours.double() - exact).abs().max()) <= 2 * theirs + bit


@pytest.mark.usefixtures("every_size")
class TestTaken:
    @pytest.mark.parametrize("masked", [None, "keys", "pairs", "both"])
    def test_multihead_attention(self, x, padded, masked):
        attention = nn.MultiheadAttention(E, 4, batch_first=True)
        options = {"need_weights": False}
        if masked in ("keys", "both"):
            options["key_padding_mask"] = padded
        if masked in ("pairs", "both"):
            options["attn_mask"] = torch.ones(L, L, dtype=torch.bool).triu(1)
        plain = attention(x, x, x, **options)[0]
        exact = copy.deepcopy(attention).double()(*[x.double()] * 3, **options)[0]
        with saccade.accelerate() as run:
            out, weights = attention(x, x, x, **options)
        assert (run.taken, run.calls, weights) == (1, 1, None)
        assert off_by(out, plain, exact)

    def test_with_weights_it_is_named_and_counted(self, x):
        attention = nn.MultiheadAttention(E, 4, batch_first=True)
        expected = attention(x, x, x)
        with saccade.accelerate() as run:
            found = attention(x, x, x)
            attention(x, x, x, need_weights=False)
        assert run.left == {_WEIGHTS: 1} and run.taken == 1
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("training", [False, True])
    def test_encoder_with_padding(self, x, padded, training):
        layer = nn.TransformerEncoderLayer(E, 4, 24, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
        real = ~padded
        with torch.no_grad():
            plain = encoder(x, src_key_padding_mask=padded)[real]
            exact = copy.deepcopy(encoder).double()(x.double(), src_key_padding_mask=padded)[real]
            with saccade.accelerate() as run:
                out = encoder(x, src_key_padding_mask=padded)[real]
        assert (run.taken, run.calls) == (2, 2)
        assert off_by(out, plain, exact)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
    def test_the_fast_path_is_off_and_padded_places_hold_other_numbers(self, x, padded):
        layer = nn.TransformerEncoderLayer(E, 4, 24, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
        with torch.no_grad():
            fast = encoder(x, src_key_padding_mask=padded)
        with torch.no_grad(), saccade.accelerate() as run:
            slow = encoder(x, src_key_padding_mask=padded)
        assert run.taken == 2
        torch.testing.assert_close(slow[~padded], fast[~padded], rtol=1e-4, atol=1e-5)
        assert (fast[padded] == 0).all() and (slow[padded] != 0).all()

    def test_decoder_step_of_training(self, x, padded):
        layer = nn.TransformerDecoderLayer(E, 4, 24, dropout=0.0, batch_first=True)
        decoder = nn.TransformerDecoder(layer, 2)
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        memory = torch.randn(B, L, E)

        def gradients(model, dtype):
            out = model(
                x[:, :5].to(dtype),
                memory.to(dtype),
                tgt_mask=causal.to(dtype),
                tgt_is_causal=True,
                memory_key_padding_mask=padded,
            )
            return torch.autograd.grad(out.square().sum() / 2 + out[..., 0].sum(), list(model.parameters()))

        plain, exact = gradients(decoder, torch.float32), gradients(copy.deepcopy(decoder).double(), torch.float64)
        with saccade.accelerate() as run:
            ours = gradients(decoder, torch.float32)
        assert (run.taken, run.calls) == (4, 4)
        largest = max(float(gradient.abs().max()) for gradient in exact)
        for one, other, judge in zip(ours, plain, exact, strict=True):
            theirs = float((other.double() - judge).abs().max())
            # A gradient that is zero but for rounding has no size of its own: the largest one's last bits count, too.
            allowed = 2 * theirs + 4 * torch.finfo(torch.float32).eps * largest
            assert float((one.double() - judge).abs().max()) <= allowed


def test_small_ones_are_left(x):
    attention = nn.MultiheadAttention(E, 4, batch_first=True)
    with saccade.accelerate() as run:
        attention(x, x, x, need_weights=False)
    assert run.taken == 0 and run.calls == 1
