"""Saccade's own modules and PyTorch's: pruned and masked are equal, optimizers go on, errors change nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import saccade
from pruning.masked import assert_equals_masked, masked, numbered
from saccade import Causal, Padding, prune
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Encoder, MultiHeadAttention, from_torch, to_torch
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from saccade.pruning import PrunedMultiheadAttention
from saccade.variants import (
    BlockTopKConfig,
    DifferentialConfig,
    GatedConfig,
    GatedDeltaConfig,
    LinearConfig,
    LinformerConfig,
    LongformerConfig,
    NystromConfig,
    PerformerConfig,
    ReformerConfig,
    SigmoidConfig,
)

PLAIN = dict(width=29, heads=6, head_width=4)


def attention(**changes: object) -> MultiHeadAttention:
    torch.manual_seed(0)
    module = MultiHeadAttention(AttentionConfig(**{**PLAIN, **changes})).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def inside(module: nn.Module) -> nn.Module:
    """As a part of something, with a path."""
    return nn.ModuleDict({"attention": module})


WIDTH = {"attention": ("attention.output", 4)}
SCHEMES = {
    "plain": {},
    "biases": dict(bias=True),
    "unfused": dict(fused=False, bias=True, output_bias=False),
    "gate, sink and norms": dict(gate=True, sink=True, qk_norm="rms", softcap=5.0),
    "rotary": dict(positions=RotaryConfig(), bias=True),
    "ALiBi": dict(positions=AlibiConfig()),
    "learned ALiBi": dict(positions=AlibiConfig(learned=True)),
    "T5": dict(positions=T5Config(8, 16)),
    "linear": dict(mechanism=LinearConfig()),
    "gated": dict(mechanism=GatedConfig()),
    "gated delta rule": dict(mechanism=GatedDeltaConfig(), kv_heads=3),
    "gated by head": dict(mechanism=GatedConfig(headwise=True)),
    "linformer": dict(mechanism=LinformerConfig(11, 5, shared="none")),
    "nystrom": dict(mechanism=NystromConfig(3)),
    "sigmoid": dict(mechanism=SigmoidConfig(11)),
    "blocks": dict(mechanism=BlockTopKConfig(3, 2)),
    "longformer": dict(mechanism=LongformerConfig(4, global_tokens=(1,))),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_pruned_and_masked_modules_are_equal(name):
    x = torch.randn(2, 11, 29, dtype=torch.float64)
    padding = Padding(torch.tensor([11, 7]))
    rows = torch.arange(11) < torch.tensor([[11], [7]])
    mask, removed = (Causal(), [0, 1]) if name == "gated delta rule" else (None, [1, 4, 5])
    pruned = assert_equals_masked(
        inside(attention(**SCHEMES[name])),
        {"attention": removed},
        WIDTH,
        lambda model: model["attention"](x, mask, padding=padding)[rows],
    )["attention"]
    assert pruned.config.heads == 6 - len(removed)
    assert pruned.output.weight.shape == (29, 4 * (6 - len(removed)))
    assert pruned.output.in_features == 4 * (6 - len(removed))


def test_a_configuration_of_a_pruned_module_makes_the_same_module():
    pruned = attention(positions=AlibiConfig(), gate=True, sink=True)
    prune(pruned, {0: [0, 3]})
    made = MultiHeadAttention(pruned.config).double()
    made.load_state_dict(pruned.state_dict())
    x = torch.randn(1, 5, 29, dtype=torch.float64)
    assert torch.equal(made.double()(x), pruned.double()(x))  # slopes are of the heads left, not of so many heads


def test_values_wider_than_keys_and_two_maps_a_head():
    x = torch.randn(2, 7, 29, dtype=torch.float64)
    wide = inside(attention(value_head_width=5, kv_heads=3))
    got = assert_equals_masked(
        wide, {"attention": [2, 3]}, {"attention": ("attention.output", 5)}, lambda m: m["attention"](x, Causal())
    )["attention"]
    assert (got.config.heads, got.config.kv_heads, got.sizes) == (4, 2, (16, 8, 10))
    both = inside(attention(mechanism=DifferentialConfig(), kv_heads=3))
    got = assert_equals_masked(
        both, {"attention": [1, 2, 5]}, {"attention": ("attention.output", 8)}, lambda m: m["attention"](x)
    )["attention"]
    assert (got.config.heads, got.config.kv_heads) == (3, 3)


def test_cross_attention_and_a_bias_for_all_heads():
    x, context = torch.randn(2, 5, 29, dtype=torch.float64), torch.randn(2, 7, 13, dtype=torch.float64)
    bias = torch.randn(2, 6, 5, 7, dtype=torch.float64)
    module = inside(attention(context_width=13))
    pruned = assert_equals_masked(
        module, {"attention": [0, 2]}, WIDTH, lambda m: m["attention"](x, context=context, bias=bias)
    )["attention"]
    assert torch.equal(pruned(x, context=context, bias=bias), pruned(x, context=context, bias=bias[:, [1, 3, 4, 5]]))


@pytest.mark.parametrize("scheme", [T5Config(8, 16), AlibiConfig(learned=True), RotaryConfig()])
def test_layers_that_share_positions_lose_their_own_heads(scheme):
    torch.manual_seed(1)
    config = BlockConfig(AttentionConfig(24, 6, positions=scheme), hidden=17)
    stack = Encoder(config, 3).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    removed = {"blocks.0.attention": [0, 5], "blocks.2.attention": [3]}
    outputs = {path: (f"{path}.output", 4) for path in removed}
    pruned = assert_equals_masked(stack, removed, outputs, lambda model: model(x))
    assert [block.attention.config.heads for block in pruned.blocks] == [4, 6, 5]
    assert [config.attention.heads for config in pruned.configs] == [4, 6, 5]
    again = {"blocks.0.attention": [0, 3]}  # numbered anew: the second and the fifth of the first ones
    assert_equals_masked(pruned, again, outputs, lambda model: model(x))
    assert pruned.blocks[0].attention.heads_left == ((2, 3), 6)


def test_a_decoder_generates_from_its_cache_what_the_masked_one_computes_at_once():
    torch.manual_seed(2)
    config = BlockConfig(AttentionConfig(24, 6, kv_heads=3, positions=RotaryConfig()), hidden=17)
    decoder = Decoder(config, 2).double().eval()
    whole = copy.deepcopy(decoder)
    masked(whole.blocks[1].attention.output, [2, 3], 4)
    prune(decoder, {1: [2, 3]})
    x, cache = torch.randn(2, 9, 24, dtype=torch.float64), decoder.cache()
    pieces = torch.cat([decoder(part, cache=cache) for part in x.split([5, 1, 3], 1)], 1)
    torch.testing.assert_close(pieces, whole(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("separate", [False, True], ids=["one matrix", "three matrices"])
def test_torch_attention_and_the_layers_around_it(separate):
    torch.manual_seed(3)
    sizes = dict(kdim=13, vdim=11) if separate else {}
    module = nn.MultiheadAttention(28, 7, batch_first=True, **sizes).double()
    whole, twin = copy.deepcopy(module), numbered(module)
    with torch.no_grad():
        whole.out_proj.weight.view(28, 7, 4)[:, [1, 5]] = 0  # it is no module that is called
    prune(module, {0: [1, 5]}), prune(twin, {0: [1, 5]})
    assert isinstance(module, PrunedMultiheadAttention)
    assert module.out_proj.weight.shape == (28, 20)
    query = torch.randn(2, 5, 28, dtype=torch.float64)
    key, value = (torch.randn(2, 9, n, dtype=torch.float64) for n in ((13, 11) if separate else (28, 28)))
    given = dict(
        key_padding_mask=torch.arange(9) >= torch.tensor([[9], [6]]),
        attn_mask=torch.randn(5, 9, dtype=torch.float64).gt(1),
    )
    expected, weights = whole(query, key, value, average_attn_weights=False, **given)
    for needed in (False, True):
        got, seen = module(query, key, value, need_weights=needed, average_attn_weights=False, **given)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen, weights[:, [0, 2, 3, 4, 6]], rtol=1e-12, atol=1e-12)
    alone = module(query[0], key[0], value[0], need_weights=False)[0]
    torch.testing.assert_close(alone, whole(query[0], key[0], value[0])[0], rtol=1e-12, atol=1e-12)
    module(query, key, value)[0].square().sum().backward(), whole(query, key, value)[0].square().sum().backward()
    for (name, mine), theirs, numbers in zip(
        module.named_parameters(), whole.parameters(), twin.parameters(), strict=True
    ):
        torch.testing.assert_close(mine.grad, theirs.grad.flatten()[numbers.long()], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("grad", [False, True])
def test_torch_encoders_run_pruned_also_where_they_would_take_their_fused_path(grad):
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(28, 4, 31, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    whole = copy.deepcopy(encoder)
    whole.use_nested_tensor = False
    with torch.no_grad():
        whole.layers[1].self_attn.out_proj.weight.view(28, 4, 7)[:, [0, 2]] = 0
    report = prune(encoder, "1.0,1.2")  # layer 0, whole, would take the fused path and hand on a nested tensor
    assert report.layers[0].path == "layers.1.self_attn"
    x, hidden = torch.randn(2, 5, 28, dtype=torch.float64), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.set_grad_enabled(grad):
        got, expected = (one(x, src_key_padding_mask=hidden)[~hidden] for one in (encoder, whole))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_the_heads_were_masked(name):
    whole = inside(attention(bias=True, gate=True))
    whole["attention"].gate.weight.requires_grad_(False)
    pruned, twin = copy.deepcopy(whole), numbered(whole)
    x = torch.randn(2, 11, 29, dtype=torch.float64)
    prune(twin, {0: [1, 4]})
    ours, theirs = OPTIMIZERS[name](pruned.parameters()), OPTIMIZERS[name](whole.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        loss = model["attention"](x).square().mean()
        loss.backward()
        optimizer.step()
        return loss  # and with it the graph, which remembers the sizes of parameters

    losses = [step(pruned, ours), step(whole, theirs)]
    prune(pruned, {"attention": [1, 4]}, optimizer=ours)
    masked(whole["attention"].output, [1, 4], 4)
    losses += [step(model, optimizer) for _ in range(2) for model, optimizer in ((pruned, ours), (whole, theirs))]
    held = {id(parameter) for group in ours.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in pruned.parameters()} and len(ours.state) == len(held) - 1
    for (path, mine), parameter, numbers in zip(
        pruned.named_parameters(), whole.parameters(), twin.parameters(), strict=True
    ):
        assert mine.requires_grad == parameter.requires_grad
        if "projection.bias" in path:  # a key's bias has no gradient but rounding, which AdamW makes large
            continue
        kept = parameter.detach().flatten()[numbers.long()]
        torch.testing.assert_close(mine.detach(), kept, rtol=1e-8, atol=1e-10, msg=path)


def test_ties_stay_and_what_keeps_its_size_may_not_be_tied():
    torch.manual_seed(5)
    layers = nn.ModuleList(attention() for _ in range(2))
    layers[1].projection.weight = layers[0].projection.weight
    with pytest.raises(ValueError, match=r"1\.projection\.weight is tied"):
        prune(layers, {0: [1]})
    with pytest.raises(ValueError, match="remove the same heads in both"):
        prune(layers, {0: [1], 1: [2]})
    prune(layers, {0: [1], 1: [1]})
    assert layers[1].projection.weight is layers[0].projection.weight


class Adapted(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner


def adapted() -> nn.Module:
    module = attention()
    module.output = Adapted(module.output)
    return module


REFUSED = {
    "no such head": (attention, {0: [6]}, "layer 0 has the heads 0 to 5, got 6"),
    "no such layer": (attention, {3: [0]}, "there is no layer 3; the model has 0"),
    "all heads": (attention, {0: range(6)}, "all 6 heads of layer 0; at least one must stay"),
    "none": (attention, {0: []}, "none given"),
    "a word": (attention, "4,1", "expected layer.head, such as 4.1, got '4'"),
    "unequal groups": (lambda: attention(kv_heads=3), {0: [0]}, r"key head 0 keeps \[1\]; .* Remove \[3, 5\] as well"),
    "random features": (lambda: attention(mechanism=PerformerConfig()), {0: [0]}, "PerformerAttention draws random"),
    "random hashes": (
        lambda: attention(mechanism=ReformerConfig()),
        {0: [0]},
        "ReformerAttention draws random",
    ),
    "an adapter": (adapted, {0: [0]}, "Adapted, expected a linear layer"),
    "keys of its own": (lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True), {0: [0]}, "add_zero_attn"),
    "no attention": (lambda: nn.Linear(3, 3), {0: [0]}, "Linear has no attention whose heads can be removed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_told_and_nothing_has_changed(case):
    make, heads, told = REFUSED[case]
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=told):
        prune(model, heads)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not isinstance(model, MultiHeadAttention) or model.config.heads == 6


def test_an_optimizer_that_cannot_be_cut_stops_it_all():
    model = inside(attention())
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: _loss(model))
    with pytest.raises(ValueError, match="LBFGS has one history of all parameters"):
        prune(model, {0: [0]}, optimizer=optimizer)
    assert model["attention"].config.heads == 6
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got str"):
        prune(model, {0: [0]}, optimizer="AdamW")


def test_an_optimizer_that_holds_its_parameters_beside_its_groups_trains_the_smaller_ones():
    model = inside(attention())
    optimizer = torch.optim.LBFGS(model.parameters())
    prune(model, {0: [0]}, optimizer=optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step(lambda: _loss(model))
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_an_optimizer_with_a_history_of_parameters_that_stay_stops_it_too():
    model = nn.Sequential(nn.Linear(3, 29).double(), inside(attention()))
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss():
        return _loss(model[1])

    optimizer.step(loss)
    with pytest.raises(ValueError, match="LBFGS has one history"):
        prune(model, {1: [0]}, optimizer=optimizer)


def _loss(model):
    model.zero_grad()
    loss = model["attention"](torch.ones(1, 3, 29, dtype=torch.float64)).square().sum()
    loss.backward()
    return loss


def test_layers_are_told_apart_by_number_name_and_path():
    config = BlockConfig(AttentionConfig(24, 6), hidden=17)
    model = saccade.nn.Transformer(config, (2, 2))
    with pytest.raises(ValueError, match=r"layer 1 is ambiguous, give one of encoder\.1 .*decoder\.1 .*cross\.1"):
        prune(model, {1: [0]})
    report = prune(
        model,
        [("encoder.1", np.int64(0)), ("cross.0", torch.tensor(2)), ("decoder.blocks.1.attention", 3), ("encoder.1", 5)],
    )
    assert [(one.name, one.path, one.removed) for one in report.layers] == [
        ("encoder.1", "encoder.blocks.1.attention", (0, 5)),
        ("cross.0", "decoder.blocks.0.cross", (2,)),
        ("decoder.1", "decoder.blocks.1.attention", (3,)),
    ]


@pytest.mark.parametrize("one", [2, np.int64(2), torch.tensor(2), [2], torch.tensor([2])])
def test_one_head_of_a_layer_needs_no_list(one):
    model = saccade.nn.Encoder(BlockConfig(AttentionConfig(24, 6), hidden=17), 2)
    assert [layer.removed for layer in prune(model, {1: one}).layers] == [(2,)]


def test_a_pruned_module_is_no_module_of_pytorchs():
    module = from_torch(nn.MultiheadAttention(8, 4, bias=False))
    prune(module, {0: [0]})
    with pytest.raises(ValueError, match="value_head_width|head_width"):
        to_torch(module)
