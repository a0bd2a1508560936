"""torch.utils.checkpoint: regions whose backward pass runs inside, and what happens outside.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import saccade

pytestmark = pytest.mark.usefixtures("every_size")


@pytest.fixture
def model():
    return nn.Linear(8, 24)


def forward(model, x, dropout=0.0):
    q, k, v = model(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).sin().sum()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_inside_the_block(model, reentrant, dropout):
    x = torch.randn(2, 5, 8, requires_grad=True)
    with saccade.accelerate():
        torch.manual_seed(3)
        expected = torch.autograd.grad(forward(model, x, dropout), [x, *model.parameters()])
    with saccade.accelerate() as run:
        torch.manual_seed(3)
        checkpoint(forward, model, x, dropout, use_reentrant=reentrant).backward()
    assert run.taken == 2  # the forward pass, and again in the backward pass
    for gradient, leaf in zip(expected, [x, *model.parameters()], strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_reentrant_regions_may_go_backward_outside(model):
    x = torch.randn(2, 5, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(forward(model, x), x)
    with saccade.accelerate():
        loss = checkpoint(forward, model, x, use_reentrant=True)
    loss.backward()  # computed again by PyTorch: equal to rounding
    torch.testing.assert_close(x.grad, expected)


def test_others_may_not_and_say_so(model):
    x = torch.randn(2, 5, 8, requires_grad=True)
    with saccade.accelerate():
        loss = checkpoint(forward, model, x, use_reentrant=False)
    with pytest.raises(CheckpointError):
        loss.backward()
