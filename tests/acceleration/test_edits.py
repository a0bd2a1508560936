"""Inside `accelerate(model)` somebody changes the model in any way that PyTorch offers: outputs follow.

The plain model is a copy made inside the block, in float64: so copies are tested as well.
"""

from __future__ import annotations

import contextlib
import copy
import pickle

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import saccade
from feed_forwards import HIDDEN, WIDTH, FeedForward, agree, fused_in
from saccade.acceleration._fused_layers import is_replacement
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")
HEADS = 6
REAL = torch.arange(37) < torch.tensor([37, 20, 9])[:, None]


class Norm(nn.Module):
    """Gemma's: its weight is added to 1."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(WIDTH)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.feed_forward = Norm(), FeedForward()

    def forward(self, hidden_states, attention_mask):
        x = self.norm(hidden_states)
        heads = [part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, attn_mask=attention_mask).transpose(1, 2).flatten(2)
        x = hidden_states + self.output(attended)
        return x + self.feed_forward(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, attention_mask=REAL[:, None, None])
        return x[REAL]


def linears(model):
    """The linear layers that still are what they were: adapters and parametrizations keep theirs inside."""
    return [part for part in model.modules() if type(part) is nn.Linear and isinstance(part.weight, nn.Parameter)]


class DataOptimizer(torch.optim.Optimizer):
    """As some published ones: they write through `.data`."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.data.sub_(0.1 * weight.grad.sign())


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, fused=True),
    "through data": DataOptimizer,
}


def step(kind, only=slice(None)):
    def edit(model, x, draw):
        optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
        with torch.enable_grad():
            model(x)[:, only].tanh().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return edit


def of_weight(change):
    def edit(model, x, draw):
        layers = linears(model)
        if layers:
            change(layers[draw % len(layers)])

    return edit


def through_numpy(layer):
    layer.weight.detach().numpy()[:] *= -1


def new_parameter(layer):
    shape = layer.weight.shape
    layer.weight = None
    layer.weight = nn.Parameter(torch.randn(shape) / 16)


def zero_a_head(layer):
    layer.weight.data[32:64] = 0


def zero_columns(layer):
    layer.weight.data[:, 32:64] = 0


def own_forward(layer):
    weight = layer.weight
    layer.forward = lambda x: F.linear(x, 2 * weight.to(x.dtype))


def swap(model, x, draw):
    layers = [part for part in linears(model) if part.weight.shape[0] == part.weight.shape[1]]
    if len(layers) > 1:
        first, second = layers[draw % len(layers)], layers[(draw + 1) % len(layers)]
        first.weight, second.weight = second.weight, first.weight


def assign(model, x, draw):
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()}, assign=True)


def load(model, x, draw):
    model.load_state_dict({name: 0.7 * value for name, value in model.state_dict().items()})


def as_a_vector(model, x, draw):
    whole = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(1.1 * whole, model.parameters())


def replace_child(model, x, draw):
    model.layers[draw % 2].feed_forward.up = nn.Linear(WIDTH, HIDDEN)


def replace_activation(model, x, draw):
    model.layers[draw % 2].feed_forward.act = (nn.ReLU6(), nn.Tanh(), nn.SiLU())[draw % 3]


def change_values(model, x, draw):
    layer = model.layers[draw % 2]
    layer.norm.eps *= 30
    if isinstance(layer.feed_forward.act, nn.GELU):
        layer.feed_forward.act.approximate = "tanh"


def normalise(model, x, draw):
    layers = linears(model)
    if layers and not any(isinstance(part, parametrize.ParametrizationList) for part in model.modules()):
        parametrizations.weight_norm(layers[draw % len(layers)])


def rescale(model, x, draw):
    for part in model.modules():
        if parametrize.is_parametrized(part):
            part.parametrizations.weight.original0.mul_(1.5)


def adapt(model, x, draw):
    peft = pytest.importorskip("peft")
    if any(hasattr(part, "lora_B") for part in model.modules()) or any(
        map(parametrize.is_parametrized, model.modules())
    ):
        return
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["query", "up", "down"]), model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    model.eval()


def merge(model, x, draw):
    for part in model.modules():
        if hasattr(part, "lora_B"):
            part.unmerge() if part.merged else part.merge()


def functional(model, x, draw):
    other = {name: value * 1.3 for name, value in model.named_parameters()}
    plain = copy.deepcopy(model)
    agree(torch.func.functional_call(model, other, (x,)), torch.func.functional_call(plain, other, (x,)), sums=12)


def compiled(model, x, draw):
    torch.compiler.reset()
    agree(torch.compile(model, backend="eager")(x), copy.deepcopy(model)(x), sums=12)
    torch.compiler.reset()


def pickled(model, x, draw):
    if not any("forward" in vars(part) and not is_replacement(part.forward) for part in model.modules()):  # a lambda
        with contextlib.suppress(RuntimeError):  # of a parametrized module only the state can be pickled
            agree(model(x), pickle.loads(pickle.dumps(model))(x), sums=12)


def mode(model, x, draw):
    model.train(draw % 2 == 0)


def half_and_back(model, x, draw):
    model.bfloat16(), model.float()


EDITS = {
    **{f"a step of {kind}": step(kind) for kind in OPTIMIZERS},
    "a sparse step": step("fused SGD", only=slice(3, 4)),
    "data.mul_": of_weight(lambda layer: layer.weight.data.mul_(1.5)),
    "data.neg_": of_weight(lambda layer: layer.weight.data.neg_()),
    "data =": of_weight(lambda layer: setattr(layer.weight, "data", torch.randn_like(layer.weight) / 16)),
    "mul_": of_weight(lambda layer: layer.weight.mul_(1.5)),
    "bias data": of_weight(lambda layer: layer.bias.data.add_(1)),
    "a head's rows": of_weight(zero_a_head),
    "a head's columns": of_weight(zero_columns),
    "numpy": of_weight(through_numpy),
    "new parameter": of_weight(new_parameter),
    "own forward": of_weight(own_forward),
    "swapped": swap,
    "assigned": assign,
    "loaded": load,
    "as a vector": as_a_vector,
    "child": replace_child,
    "activation": replace_activation,
    "values": change_values,
    "weight_norm": normalise,
    "g of weight_norm": rescale,
    "LoRA": adapt,
    "merged": merge,
    "functional_call": functional,
    "compiled": compiled,
    "pickled": pickled,
    "mode": mode,
    "half": half_and_back,
}


def check(model, x):
    plain = copy.deepcopy(model)
    assert not fused_in(plain)
    exact = plain.double()(x.double())
    agree(model(x), exact, sums=12)
    agree(model(x), exact, sums=12)


def edited(names, draws):
    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(3, 37, WIDTH)
    with torch.no_grad(), saccade.accelerate(model):
        model(x), model(x)
        for name, draw in zip(names, draws, strict=True):
            EDITS[name](model, x, draw)
            check(model, x)
    with torch.no_grad():
        check(model, x)
        assert not fused_in(model)


FAST = (
    "a step of fused AdamW",
    "data =",
    "a head's rows",
    "new parameter",
    "own forward",
    "child",
    "values",
    "weight_norm",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in EDITS])
def test_an_edit_is_seen_by_the_next_call(name):
    edited([name] * 2, [1, 6])


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 11)), min_size=2, max_size=7))
def test_any_edits_one_after_another(edits):
    edited([name for name, _ in edits], [draw for _, draw in edits])
