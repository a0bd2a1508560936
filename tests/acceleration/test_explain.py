"""What `explain()` says of a model of many layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import saccade
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")


@torch.no_grad()
def test_layers_that_are_alike_are_one_line():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(192, 6, 311, batch_first=True), 5).eval()
    model.layers[3].linear1.register_forward_hook(lambda *_: None)
    with saccade.accelerate(model) as run:
        model(torch.randn(2, 11, 192))
    short = run.explain().splitlines()
    assert "layers.0-4.self_attn: nn.MultiheadAttention, taken (5 modules)" in short
    assert "layers.0,1,2,4: feed-forward, taken (4 modules)" in short
    assert "layers.3: feed-forward, a forward hook is set inside" in short
    whole = run.explain(every=True).splitlines()
    assert "layers.2.self_attn: nn.MultiheadAttention, taken" in whole
    assert len(whole) == len(run._model.layers) + len(str(run).splitlines())
