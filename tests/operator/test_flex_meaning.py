"""FlexAttention receives the same meaning: PyTorch's eager flex_attention (any device) against the reference.

The compiled kernel runs on CUDA only; what is checked here is what we hand to it: mask, scores, sink, cleaned keys.
"""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import saccade
from looped import looped
from saccade.operator._backends import flex
from saccade.operator._checks import make_call
from slowly import slow_but

B, HQ, HKV, LQ, LK, D, DV = 2, 6, 3, 23, 29, 17, 19

MASKS = {
    "none": None,
    "window of queries placed apart": (saccade.Causal() & saccade.Window(5, None)).at([6, 2]),
    "padded queries": saccade.Padding([29, 11], [23, 7]) & saccade.Causal(),
    "empty item": saccade.Padding([29, 0]),
    "per head": saccade.PerHead([saccade.Window(h, h) for h in range(HQ)]),
    "slice": saccade.Causal().slice((4, 27), (3, 32), lengths=(31, 37)),
}
BIASES = {
    "none": lambda: None,
    "tensor": lambda: torch.randn(B, 1, LQ, LK),
    "alibi": lambda: saccade.ALiBi(torch.rand(HQ)),
    "relative": lambda: saccade.RelativeBias(torch.randn(10, HQ)),
}


PAIRS = list(itertools.product(MASKS, BIASES))
# Masks and biases are translated apart from each other: every pair of them with -m slow.
EACH = [*zip(MASKS, itertools.cycle(BIASES))]


@pytest.mark.parametrize(("mask", "bias"), slow_but(PAIRS, *EACH))
def test_eager_flex_is_the_reference(mask, bias):
    torch.manual_seed(5)
    tensors = torch.randn(B, HQ, LQ, D), torch.randn(B, HKV, LK, D), torch.randn(B, HKV, LK, DV)
    options = {"bias": BIASES[bias](), "scale": 0.3, "softcap": 2.0, "sink": torch.randn(HQ)}
    call = make_call(*tensors, MASKS[mask], **options, dropout=0.0, needs_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager flex_attention warns that it is not compiled
        out, lse = flex.attend(call, flex_attention)
    expected, expected_lse = saccade.attention_with_lse(*tensors, MASKS[mask], **options, backend="reference")
    # Sums of at most 29 terms of order 10 in float32: 29 * 10 * 2^-24 = 2e-5.
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
def test_keys_nobody_sees_are_never_read():
    torch.manual_seed(7)
    query, key, value = torch.randn(B, HQ, LQ, D), torch.randn(B, HKV, LK, D), torch.randn(B, HKV, LK, DV)
    mask = saccade.Padding([29, 11])
    clean = make_call(query, key, value, mask, bias=None, scale=None, softcap=None, sink=None, dropout=0.0)
    key, value = key.clone(), value.clone()
    key[1, :, 11:], value[1, :, 11:] = float("nan"), float("inf")
    dirty = make_call(query, key, value, mask, bias=None, scale=None, softcap=None, sink=None, dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(flex.attend(dirty, flex_attention)[0], flex.attend(clean, flex_attention)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention is used on CUDA only")
@looped("mask", MASKS)
def test_compiled_flex_is_the_reference(mask):
    torch.manual_seed(5)
    shapes = ((B, HQ, 230, 64), (B, HKV, 290, 64), (B, HKV, 290, 64))
    tensors = [torch.randn(*shape, device="cuda") for shape in shapes]
    chosen = saccade.Causal() & saccade.Window(50, None) if mask == "per head" else saccade.Causal()
    out = saccade.attention(*tensors, chosen, backend="flex")
    expected = saccade.attention(*(x.double() for x in tensors), chosen, backend="chunked")
    torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=5e-3)  # TF32 products: 2^-11 relative


def test_refused_on_a_cpu():
    query = torch.randn(B, HQ, LQ, D)
    with pytest.raises(ValueError, match="backend 'flex' cannot do this call: FlexAttention is used on CUDA only"):
        saccade.attention(query, query, query, backend="flex")
