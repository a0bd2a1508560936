"""`weights="int8"`: every linear layer of a model is the one with rounded weights and rows, and nothing else changes.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import saccade
from saccade.operator._int8 import BLOCK, int8_weight

SIZES = dict(vocab_size=307, hidden_size=192, intermediate_size=389, num_hidden_layers=2, num_attention_heads=3)
REAL = torch.arange(37) < torch.tensor([37, 5, 23])[:, None]


def rounded(x):
    """x with each block of a row on its 256 steps, as bytes hold it."""
    parts = F.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    low, high = parts.amin(-1, keepdim=True).clamp_max(0), parts.amax(-1, keepdim=True).clamp_min(0)
    step = ((high - low) / 255).clamp_min(1e-30)
    zero = (-low / step).round()
    return (((parts / step + zero).round().clamp(0, 255) - zero) * step).flatten(-2)[..., : x.shape[-1]]


def simulated(model):
    """A copy whose linear layers round weights and inputs and multiply in float64."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.weight.numel() >= 2**15:
            weight = int8_weight(part.weight).dense().double()

            def forward(x, weight=weight, bias=part.bias):
                return F.linear(rounded(x).double(), weight, None if bias is None else bias.double()).to(x.dtype)

            part.forward = forward
    return model


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1, eos_token_id=None))


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def tokens():
    torch.manual_seed(1)
    return {"input_ids": torch.randint(3, 307, REAL.shape), "attention_mask": REAL.long()}


@pytest.fixture
def model(request):
    torch.manual_seed(0)
    return request.param().eval()


@pytest.mark.parametrize("model", [bert, llama], indirect=True, ids=["bert", "llama"])
@torch.no_grad()
def test_it_is_the_model_with_rounded_layers(model, every_size):
    """A number on the edge of two steps may fall to the other side, which is a step of 1/255; rounding that the
    simulation lacks, such as a layer that is rounded twice or not at all, is larger in the mean."""
    batch, expected = tokens(), model(**tokens())[0][REAL]
    wanted = simulated(model)(**batch)[0][REAL]
    apart = (wanted - expected).square().mean().sqrt()
    assert apart > 1e-3 * expected.square().mean().sqrt()  # there is something to tell
    with saccade.accelerate(model, weights="int8"):
        for _ in range(3):  # proofs, then fused layers and rows without padding
            got = model(**batch)[0][REAL]
            assert (got - wanted).square().mean().sqrt() < 0.2 * apart
    assert torch.equal(model(**batch)[0][REAL], expected)


@pytest.mark.parametrize("model", [bert], indirect=True)
@torch.no_grad()
def test_padding_is_left_out_all_the_same(model, every_size):
    batch = tokens()
    with saccade.accelerate(model, weights="int8") as run:
        for _ in range(3):
            model(**batch)
        assert "encoder.layer.0,1: layer without padding, taken" in run.explain()


@torch.no_grad()
def test_writes_to_weights_are_followed():
    torch.manual_seed(0)
    layer, x = nn.Linear(384, 211), torch.randn(5, 384)
    with saccade.accelerate(layer, weights="int8"):
        for change in (lambda w: w.mul_(-2), lambda w: w[7].add_(1), lambda w: w.data.mul_(0.5)):
            layer(x)
            change(layer.weight)
            wanted = rounded(x).double() @ int8_weight(layer.weight).dense().double().T + layer.bias.double()
            assert torch.allclose(layer(x).double(), wanted, atol=1e-4)
        layer.weight = nn.Parameter(torch.randn(211, 384))
        wanted = rounded(x).double() @ int8_weight(layer.weight).dense().double().T + layer.bias.double()
        assert torch.allclose(layer(x).double(), wanted, atol=1e-4)


@torch.no_grad()
def test_layers_of_saccades_own_models_and_only_inside_the_block():
    lm = saccade.models.load()
    ids = lm.tokenizer.encode("The cat sat on the mat")
    x = torch.tensor([getattr(ids, "ids", ids)])
    before = lm.model(x)
    with saccade.accelerate(lm.model, weights="int8") as run:
        inside = lm.model(x)
        assert "linear layers of Saccade's own, in int8" in str(run)
    apart = (inside - before).abs().max() / before.abs().max()
    assert 1e-5 < apart < 0.05
    assert torch.equal(lm.model(x), before)


def test_adapters_train_beside_it_and_the_weights_do_not():
    torch.manual_seed(0)
    base, down, up = nn.Linear(384, 211), nn.Linear(384, 3, bias=False), nn.Linear(3, 211, bias=False)
    x = torch.randn(5, 384)
    with saccade.accelerate(base, weights="int8"):
        with pytest.raises(RuntimeError, match="int8 weights cannot be trained"):
            base(x).sum().backward()
        base.requires_grad_(False)
        (base(x) + up(down(x))).square().sum().backward()
    assert down.weight.grad.abs().sum() > 0
    assert base.weight.grad is None


def test_wrong_arguments():
    layer = nn.Sequential(nn.Linear(192, 192), nn.Linear(192, 192))
    with pytest.raises(ValueError, match="weights: expected None, 'bfloat16' or 'int8', got 'int4'"):
        saccade.accelerate(layer, weights="int4")
    with pytest.raises(ValueError, match="keep_weights: expected True with weights='int8'"):
        saccade.accelerate(layer, weights="int8", keep_weights=False)
    layer[1].weight.data[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"model: 1\.weight holds NaN or infinities"):
        saccade.accelerate(layer, weights="int8").install()
    assert "forward" not in vars(layer[0])
    assert layer(torch.randn(2, 192)).shape == (2, 192)
