"""Modules under torch.compile: one graph where the native kernels are, or PyTorch's do; graphs around it elsewhere."""

from __future__ import annotations

import pytest
import torch

from saccade import Causal, Padding, Window
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Encoder, Transformer
from saccade.operator._backends.native import _kernels
from saccade.positions import RotaryConfig, T5Config

B, L, WIDTH, HEADS = 2, 19, 32, 2  # heads of 64 bytes: what the fused kernel takes on a CPU


def config(**attention) -> BlockConfig:
    return BlockConfig(AttentionConfig(WIDTH, HEADS, **attention), hidden=17)


def check(module, *arguments, fullgraph, **options):
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=fullgraph, backend="aot_eager")
    out, expected = compiled(*arguments, **options), module(*arguments, **options)
    torch.testing.assert_close(out, expected)
    cotangent, parameters = torch.randn_like(out), list(module.parameters())
    ours = torch.autograd.grad(out, parameters, cotangent, allow_unused=True)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, parameters, cotangent, allow_unused=True))


def x() -> torch.Tensor:
    return torch.randn(B, L, WIDTH)


@pytest.mark.slow
def test_one_graph():
    check(Decoder(config(positions=RotaryConfig(), kv_heads=1), 2), x(), fullgraph=True)
    check(Decoder(config(), 2, checkpointing=True), x(), fullgraph=True)
    check(Encoder(config(qk_norm="rms", gate=True), 2), x(), fullgraph=True)
    check(Transformer(config(), 2), x(), x(), fullgraph=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own, where it resumes
def test_masks_biases_and_padding():
    """One graph where the native kernels are; elsewhere graphs around what cannot be traced."""
    one = _kernels.module is not None
    check(Encoder(config(positions=T5Config()), 2), x(), fullgraph=one)
    check(Encoder(config(sink=True), 2), x(), fullgraph=one)
    check(Decoder(config(window=Window(5, 0)), 2), x(), fullgraph=one)
    check(Decoder(config(), 2), x(), Causal() & Window(4, 0), fullgraph=one)
    check(Encoder(config(), 2), x(), padding=Padding([3, 19]), fullgraph=one)
    check(Decoder(config(), 2), x(), padding=Padding(torch.rand(B, L) < 0.7), fullgraph=one)
