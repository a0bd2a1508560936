"""What a module is taken for after its first call: nothing that other numbers, texts or calls would refute."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.acceleration import _proof
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")


class FeedForward(nn.Module):
    """`around(down(act(up(x))))`."""

    def __init__(self, act=None, around=lambda x, out: out):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(192, 311, False), act or nn.GELU(), nn.Linear(311, 192, False)
        self.around = around

    def forward(self, x):
        return self.around(x, self.down(self.act(self.up(x))))


class Scaled(FeedForward):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale


class Dropping(FeedForward):
    """As transformers' modules: dropout by the mode, without a module of its own."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.3, self.training)


class Norm(nn.Module):
    def __init__(self, low=0.0, high=torch.inf):
        super().__init__()
        self.weight, self.eps, self.low, self.high = nn.Parameter(torch.ones(192)), 1e-6, low, high

    def forward(self, x):
        variance = x.square().mean(-1, keepdim=True).clamp(self.low, self.high)
        return x * torch.rsqrt(variance + self.eps) * self.weight


class Activated(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up, self.act = nn.Linear(192, 311), act

    def forward(self, x):
        return self.act(self.up(x))


class Cut(nn.Module):
    """A GELU that gives nothing for small numbers."""

    def forward(self, x):
        return F.gelu(x).where(x.abs() > 1e-3, 0)


CASES = {
    "ReLU6": lambda: Activated(nn.ReLU6()),
    "Hardtanh": lambda: Activated(nn.Hardtanh(0, 8)),
    "a clipped GELU": lambda: Activated(lambda x: F.gelu(x).clamp(-10, 10)),
    "a GELU with a threshold": lambda: Activated(Cut()),
    "its own residual": lambda: FeedForward(around=lambda x, out: x + out),
    "a clamp on large outputs": lambda: FeedForward(around=lambda x, out: out.clamp(-50, 50)),
    "a norm with a least variance": lambda: Norm(low=1e-4),
    "a norm with a largest variance": lambda: Norm(high=1e4),
}
FIRST = {"zeros": torch.zeros, "ordinary numbers": torch.randn}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_first_call_proves_no_more_than_it_shows(name, first):
    torch.manual_seed(0)
    module = CASES[name]().eval()
    plain = copy.deepcopy(module)
    with saccade.accelerate(module):
        for x in (FIRST[first](3, 11, 192), 1e3 * torch.randn(3, 11, 192), 1e-4 * torch.randn(3, 11, 192)):
            for _ in range(2):
                torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4 * float(x.abs().max()))


@pytest.mark.parametrize("scale", [1.0, nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(192))])
@torch.no_grad()
def test_a_scale_that_was_one_in_the_first_call(scale):
    torch.manual_seed(0)
    module, x = Scaled(scale), torch.randn(3, 11, 192)
    with saccade.accelerate(module):
        before = module(x).clone()
        if isinstance(scale, nn.Parameter):
            scale.fill_(3)
        else:
            module.scale = 3.0
        torch.testing.assert_close(module(x), 3 * before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_module_proved_without_dropout_drops_when_it_trains():
    torch.manual_seed(0)
    module, x = Dropping().eval(), torch.randn(3, 11, 192)
    with saccade.accelerate(module):
        module(x), module(x)
        module.train()
        assert 0.2 < float((module(x) == 0).float().mean()) < 0.4
        module.eval()
        assert not bool((module(x) == 0).any())


@torch.no_grad()
def test_what_changes_without_a_trace_is_found_by_a_later_proof(monkeypatch):
    """A switch outside the module, such as a field of a configuration that all layers read."""
    torch.manual_seed(0)
    monkeypatch.setattr(_proof, "_MEAN", 3)
    factor = [1.0]
    module, x = FeedForward(around=lambda x, out: out * factor[0]), torch.randn(3, 11, 192)
    with saccade.accelerate(module) as run:
        module(x), module(x)
        factor[0] = 2.0
        with pytest.warns(RuntimeWarning, match="feed-forward.* gives something else than when it was proved"):
            for _ in range(6):
                out = module(x)
        torch.testing.assert_close(out, module.down(module.act(module.up(x))) * 2, rtol=1e-4, atol=1e-4)
    assert "gives something else" in run.explain()


@torch.no_grad()
def test_a_later_proof_is_neither_counted_nor_observed(monkeypatch):
    """A second computation of attention would show as a call that the model never made."""
    torch.manual_seed(0)
    monkeypatch.setattr(_proof, "_MEAN", 1)  # every other call
    layer, x = nn.TransformerEncoderLayer(192, 6, 311, batch_first=True).eval(), torch.randn(3, 37, 192)
    real = torch.arange(37) < torch.tensor([37, 12, 20])[:, None]
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with saccade.accelerate(stack) as run:
        stack(x, src_key_padding_mask=~real), stack(x, src_key_padding_mask=~real)
        before = run.calls
        for _ in range(6):
            stack(x, src_key_padding_mask=~real)
        assert run.calls - before == 6 * 2
        names = []
        with saccade.watch(stack, layers=lambda site, step: names.append(site.name) or True):
            for _ in range(6):
                stack(x)
    assert len(set(names)) == 2, "a second call of a module has a name of its own"


RULES = {
    "NaN becomes 0": lambda x, out: torch.nan_to_num(out),
    "an infinity is cut": lambda x, out: out.where(~x.isinf().any(-1, keepdim=True), 0),
    "items with a NaN": lambda x, out: out * (1 + x.isnan().any()),
    "zeros are padding": lambda x, out: out * (x != 0).any(-1, keepdim=True),
    "some zeros": lambda x, out: out * (x != 0).all(-1, keepdim=True),
    "a single token": lambda x, out: 2 * out if x.shape[1] == 1 else out,
    "a long text": lambda x, out: 2 * out if x.shape[1] > 17 else out,
    "a large batch": lambda x, out: 2 * out if x.shape[0] > 5 else out,
    "no batch": lambda x, out: 2 * out if x.dim() == 2 else out,
}


@pytest.mark.parametrize("name", RULES)
@torch.no_grad()
def test_a_rule_for_unusual_numbers_or_sizes(name):
    torch.manual_seed(0)
    module = FeedForward(around=RULES[name])
    plain, x = copy.deepcopy(module), torch.randn(3, 11, 192)
    nan, infinite, zeros = x.clone(), x.clone(), x.clone()
    nan[1, 7, 5], infinite[1, 7, 5], zeros[1, 7], zeros[1, 8, 5] = torch.nan, torch.inf, 0, 0
    with saccade.accelerate(module):
        module(x), module(x)
        for later in (
            nan,
            infinite,
            zeros,
            x[:, :1],
            x[:1, :1],
            torch.randn(3, 19, 192),
            torch.randn(7, 11, 192),
            x[0],
        ):
            torch.testing.assert_close(module(later), plain(later), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_weight_that_was_dropped_and_given_anew():
    torch.manual_seed(0)
    layer, x, new = nn.Linear(192, 311), torch.randn(37, 192), torch.randn(311, 192)
    with torch.no_grad(), saccade.accelerate(layer, keep_weights=False):
        layer(x)
        layer.weight = nn.Parameter(new.clone())
        torch.testing.assert_close(layer(x), F.linear(x, new, layer.bias), rtol=1e-4, atol=1e-4)
    assert torch.equal(layer.weight, new)


class Layer(nn.Module):
    """Attention, and what `mix` does to hidden states (B, L, E) before it."""

    def __init__(self, mix=lambda x: x):
        super().__init__()
        self.projection, self.output, self.mix = nn.Linear(192, 576), nn.Linear(192, 192), mix

    def forward(self, hidden_states, attention_mask):
        heads = self.projection(self.mix(hidden_states)).unflatten(-1, (3, 6, 32)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*heads, attn_mask=attention_mask)
        return hidden_states + self.output(out.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, mix=lambda x: x, between=lambda x: x):
        super().__init__()
        self.layers, self.between = nn.ModuleList([Layer(mix), Layer(mix)]), between

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, attention_mask=mask)
            self.between(x)
        return x


def padding(*lengths, of=37):
    return (torch.arange(of) < torch.tensor(lengths)[:, None])[:, None, None]


def shifted(by):
    """A token reads the one `by` places before it: a convolution by hand."""
    return lambda x: x + F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


class Convolution(nn.Conv1d):
    def __init__(self):
        super().__init__(192, 192, 3, padding=1, groups=64)

    def forward(self, x):
        return x + super().forward(x.transpose(1, 2)).transpose(1, 2)


def padded_agrees(model, plain, x, mask):
    real = mask[:, 0, 0]
    torch.testing.assert_close(model(x.clone(), mask)[real], plain(x.clone(), mask)[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mix", [shifted(1), shifted(9), Convolution()], ids=["next", "far", "convolution"])
@torch.no_grad()
def test_texts_of_a_batch_never_read_each_other(mix):
    """Proved by one text, by short ones or by zeros, a layer that reads its neighbours would read another text."""
    torch.manual_seed(0)
    model = Stack(mix)
    plain = copy.deepcopy(model)
    with saccade.accelerate(model):
        for x, mask in [
            (torch.randn(1, 37, 192), padding(20)),
            (torch.zeros(3, 37, 192), padding(5, 37, 12)),
            (torch.randn(3, 37, 192), padding(1, 4, 7)),
            (torch.randn(3, 37, 192), padding(11, 37, 12)),
            (torch.randn(3, 37, 192), padding(11, 37, 12)),
        ]:
            padded_agrees(model, plain, x, mask)


@pytest.mark.parametrize("rule", [lambda length: length == 1, lambda length: length > 64], ids=["single", "long"])
@torch.no_grad()
def test_layers_with_a_rule_for_the_length_of_a_text(rule):
    """A row of the tokens of all texts has another length than they have."""
    torch.manual_seed(0)
    model = Stack(lambda x: 2 * x if rule(x.shape[1]) else x)
    plain = copy.deepcopy(model)
    with saccade.accelerate(model):
        for mask in (
            padding(20, 9, 11),
            padding(20, 9, 11),
            padding(1, 0, 0),
            padding(1, 1, 0, of=1),
            padding(25, 22, 20),
        ):
            padded_agrees(model, plain, torch.randn(3, mask.shape[-1], 192), mask)
        padded_agrees(model, plain, torch.randn(3, 67, 192), padding(20, 9, 11, of=67))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(0.5), lambda x: x[:, 2].zero_(), lambda x: x.data.neg_(), lambda x: x[..., :3].add_(1)]
)
def test_hidden_states_changed_between_layers(change, inference):
    torch.manual_seed(0)
    model, x, mask = Stack(between=change), torch.randn(3, 37, 192), padding(37, 12, 20)
    with torch.inference_mode() if inference else torch.no_grad():
        plain = copy.deepcopy(model)
        with saccade.accelerate(model):
            for _ in range(3):
                padded_agrees(model, plain, x, mask)


@pytest.mark.parametrize("inference", [False, True])
def test_a_padding_mask_changed_in_place(inference):
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(3, 37, 192)
    with torch.inference_mode() if inference else torch.no_grad():
        plain, mask = copy.deepcopy(model), padding(37, 12, 20).clone()
        with saccade.accelerate(model):
            padded_agrees(model, plain, x, mask), padded_agrees(model, plain, x, mask)
            mask.copy_(padding(37, 13, 19))
            padded_agrees(model, plain, x, mask)
            mask.data[1, 0, 0, 11:13] = False
            padded_agrees(model, plain, x, mask)


@torch.inference_mode()
def test_projections_of_a_tensor_changed_between_them():
    """In inference mode PyTorch counts no writes."""
    torch.manual_seed(0)
    module = nn.ModuleDict({name: nn.Linear(192, 192) for name in ("query", "key")})
    with saccade.accelerate(module):
        for _ in range(3):
            x = torch.randn(3, 11, 192)
            module["query"](x)
            x[1].add_(1)
            torch.testing.assert_close(module["key"](x), F.linear(x, module["key"].weight, module["key"].bias))
