"""Layers without padding: who reads padding after all gets what the model would have computed there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.power = 0, 0.0
        self.projection, self.output = nn.Linear(192, 576), nn.Linear(192, 192)

    def forward(self, hidden_states, attention_mask=None):
        heads = self.projection(hidden_states).unflatten(-1, (3, 6, 32)).permute(2, 0, 3, 1, 4)
        out = self.output(F.scaled_dot_product_attention(*heads, attn_mask=attention_mask).transpose(1, 2).flatten(2))
        out = hidden_states + out * (hidden_states.shape[1] / 16) ** self.power
        return out + out.roll(self.shift, 1) if self.shift else out


class Stack(nn.Module):
    def __init__(self, between=lambda x: x):
        super().__init__()
        self.layers, self.between = nn.ModuleList([Layer(), Layer(), Layer()]), between

    def forward(self, x, *masks):
        for layer, mask in zip(self.layers, masks, strict=True):
            x = self.between(layer(x, attention_mask=mask))
        return x


def padding(*lengths, of=16):
    return (torch.arange(of) < torch.tensor(lengths)[:, None])[:, None, None]


def agrees(model, plain, x, *masks):
    real = torch.stack([mask.expand(len(x), 1, 1, x.shape[1])[:, 0, 0] for mask in masks if mask is not None]).all(0)
    torch.testing.assert_close(model(x, *masks)[real], plain(x, *masks)[real], rtol=1e-4, atol=1e-4)


A, B, LAST = padding(12, 6), padding(6, 12), padding(1, 16)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("masks", [(A, B, B), (A, None, A), (A, A, None), (A, A, LAST)])
def test_layers_with_other_masks(masks, inference):
    """From the first call on, and only after all layers were proved with the same mask."""
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, 16, 192)
    plain = copy.deepcopy(model)
    with torch.inference_mode() if inference else torch.no_grad():
        for first in (masks, (A, A, A)):
            with saccade.accelerate(model):
                for given in (first, first, masks, (A, A, A), (A, A, A), masks):
                    agrees(model, plain, x, *given)


@torch.no_grad()
def test_other_masks_where_hidden_states_cannot_be_computed_again():
    torch.manual_seed(0)
    model, x = Stack(between=lambda x: x * 2).eval(), torch.randn(2, 16, 192)
    plain = copy.deepcopy(model)
    with saccade.accelerate(model):
        agrees(model, plain, x, A, A, A), agrees(model, plain, x, A, A, A)
        with pytest.warns(RuntimeWarning, match="may be wrong"):
            model(x, A, None, A)
        agrees(model, plain, x, A, None, A)


@torch.no_grad()
def test_a_layer_that_mixes_tokens_beside_others_that_do_not():
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, 16, 192)
    plain = copy.deepcopy(model)
    plain.layers[1].shift = model.layers[1].shift = -1  # reads the token behind: the first one of the padding
    with saccade.accelerate(model) as run:
        for _ in range(3):
            agrees(model, plain, x, A, A, A)
    assert "stands beside a layer that reads padding" in run.explain()


@torch.no_grad()
def test_an_attribute_of_a_layer_set_later():
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, 16, 192)
    plain = copy.deepcopy(model)
    with saccade.accelerate(model):
        agrees(model, plain, x, A, A, A), agrees(model, plain, x, A, A, A)
        model.layers[1].shift = plain.layers[1].shift = 1
        agrees(model, plain, x, A, A, A), agrees(model, plain, x, A, A, A)


@torch.no_grad()
def test_as_many_tokens_as_places_prove_nothing():
    """A layer that scales by its length gives the same for 8 + 8 tokens in a row as for 2 x 16 places."""
    torch.manual_seed(0)
    model, x = Stack().eval(), torch.randn(2, 16, 192)
    for layer in model.layers:
        layer.power = 1.0
    plain = copy.deepcopy(model)
    with saccade.accelerate(model):
        for mask in (padding(9, 7), padding(9, 7), A, padding(3, 4)):
            agrees(model, plain, x, mask, mask, mask)


@torch.no_grad()
def test_entries_of_a_mask_changed_through_numpy():
    torch.manual_seed(0)
    model, x, mask = Stack().eval(), torch.randn(2, 256, 192), padding(200, 130, of=256)
    plain, memory = copy.deepcopy(model), mask.numpy()
    with saccade.accelerate(model):
        for lengths in ((200, 130), (200, 130), (180, 100), (181, 100), (182, 100), (183, 101)):
            memory[:] = padding(*lengths, of=256).numpy()
            agrees(model, plain, x, mask, mask, mask)
