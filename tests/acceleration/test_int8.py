"""`weights="int8"`: every linear layer of a model is the one with rounded weights and rows, and nothing else changes.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import saccade
from rounded_by_hand import rounded
from saccade.operator import _products
from saccade.operator._int8 import int8_weight
from saccade.operator.nn._rounded import Rounding

SIZES = dict(vocab_size=307, hidden_size=192, intermediate_size=389, num_hidden_layers=2, num_attention_heads=3)
REAL = torch.arange(37) < torch.tensor([37, 5, 23])[:, None]


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


class Spy:
    """Counts calls of two products in one, and of those that end in a norm."""

    def __init__(self, monkeypatch):
        self.count, self.norms, self.multiply = 0, 0, _products.multiply_int8
        monkeypatch.setattr(_products, "multiply_int8", self)

    def __call__(self, *args, then=None, norm=None, **kwargs):
        self.count += then is not None
        self.norms += norm is not None
        return self.multiply(*args, then=then, norm=norm, **kwargs)


@torch.no_grad()
def test_feed_forward_layers_are_one_pass_unless_somebody_looks_inside(monkeypatch):
    """Only here it shows that wide numbers or sums before norms are still written, or that a hook is not called."""
    torch.manual_seed(0)
    spy, x = Spy(monkeypatch), torch.randn(8, 48 * torch.get_num_threads(), 192)
    attention = saccade.nn.AttentionConfig(192, heads=3)
    shape = dict(hidden=389, activation="gelu", placement="post", norm="layer")
    own = saccade.nn.EncoderBlock(saccade.nn.BlockConfig(attention, **shape))
    config = transformers.BertConfig(**SIZES, attn_implementation="sdpa")
    foreign = transformers.models.bert.modeling_bert.BertLayer(config)
    held = copy.deepcopy(own)
    Rounding(held, "int8").round_all()
    parts = (own, own.feed_forward.up), (held, held.feed_forward.up), (foreign, foreign.intermediate)
    for block, inner in parts:
        with contextlib.nullcontext() if block is held else saccade.accelerate(block.eval(), weights="int8"):
            for _ in range(2):
                block(x)
            count, norms, fused, seen = spy.count, spy.norms, block(x), []
            assert (spy.count, spy.norms) == (count + 1, norms + 2)
            handle = inner.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
            plain = block(x)
            handle.remove()
            assert (spy.count, spy.norms) == (
                count + 1,
                norms + 3 + (block is foreign),
            )  # it ends in a norm all the same
        assert seen[0].shape == (*x.shape[:2], 389)
        assert (plain - fused).square().mean() < 1e-6  # norms give ones; few roundings fall to the other side


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
    """All of them: the simulation leaves none out."""
    lm = saccade.models.load()
    x = torch.tensor([lm.tokenizer.encode("The cat sat on the mat").ids])
    before, wanted = lm.model(x), simulated(lm.model)(x)
    with saccade.accelerate(lm.model, weights="int8") as run:
        got = lm.model(x)
        with pytest.raises(RuntimeError, match="model: it is accelerated already"):
            saccade.accelerate(lm.model, weights="int8").install()
        assert torch.equal(lm.model(x), got)
    assert "16  linear layers of Saccade's own, in int8" in str(run)
    assert (got - wanted).square().mean() < 0.04 * (wanted - before).square().mean()
    assert torch.equal(lm.model(x), before)


@torch.no_grad()
def test_proofs_are_as_strict_as_without():
    """Two ways are compared in float32: a norm by 1 + weight with weights of about 20 is 5 % off one by weight, and a
    sum with 0.96 of the residual 4 %."""
    torch.manual_seed(0)
    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=64)
    model = transformers.GemmaModel(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.uniform_(15, 40)
    with saccade.accelerate(model, weights="int8") as run:
        for _ in range(2):
            model(**tokens())
        norms = [layer for layer in run._model.layers if layer.kind == "RMS norm"]
        assert [layer.state for layer in norms] == ["taken"] * 5
        x = torch.randn(2, 7, 192)
        want = F.rms_norm(x, (192,), eps=1e-6) * (1 + model.norm.weight)
        assert torch.allclose(model.norm(x), want, rtol=1e-4)


class Leaky(nn.Module):
    """A layer whose tokens read the mean of all, padding included."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(192, 192)

    def forward(self, hidden_states, attention_mask=None):
        x = hidden_states.unflatten(-1, (3, 64)).transpose(1, 2)
        out = F.scaled_dot_product_attention(x, x, x, attention_mask).transpose(1, 2).flatten(2)
        return self.mix(out) + 0.03 * hidden_states.mean(1, keepdim=True)


@torch.no_grad()
def test_a_layer_that_reads_padding_is_found_beside_roundings_as_large(every_size):
    torch.manual_seed(0)
    stack, x = nn.ModuleList([Leaky(), Leaky()]).eval(), torch.randn(3, 37, 192)
    with saccade.accelerate(stack, weights="int8") as run:
        for _ in range(2):
            stack[1](stack[0](x, REAL[:, None, None]), REAL[:, None, None])
        assert "layer without padding, taken" not in run.explain()


@torch.no_grad()
def test_attention_of_pytorch_gives_the_same_at_its_first_call():
    torch.manual_seed(0)
    module, x = nn.MultiheadAttention(192, 3, batch_first=True).eval(), torch.randn(2, 37, 192)
    with saccade.accelerate(module, weights="int8") as run:
        outs = [module(x, x, x, need_weights=False)[0] for _ in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0], module(x, x, x, need_weights=False)[0], atol=1e-5)
    assert "nn.MultiheadAttention, taken" in run.explain()


def test_what_is_not_in_8_bits_is_said():
    half, model = nn.Linear(192, 192).half(), saccade.models.load().model.double()
    for module, dtype, count in ((half, "float16", 1), (model, "float64", 16)):
        with saccade.accelerate(module, weights="int8") as run:
            assert f"{count}  linear layers not in int8: weights are {dtype}" in str(run)
            assert "own, in int8" not in str(run)


def test_gradients_of_inputs_beside_weights_that_could_learn():
    torch.manual_seed(0)
    layer, x = nn.Linear(384, 211), torch.randn(384, requires_grad=True)
    with saccade.accelerate(layer, weights="int8"):
        dx, db = torch.autograd.grad(layer(x).sum(), (x, layer.bias))
    assert torch.allclose(dx.double(), int8_weight(layer.weight).dense().double().sum(0), atol=1e-5)
    assert torch.equal(db, torch.ones(211))


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
