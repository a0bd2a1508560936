"""What 8 bits do to a model is measured on samples, and layers stay in float until a bound holds.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import transformers
from torch import nn

import saccade
from rounded_by_hand import rounded
from saccade.operator._int8 import int8_weight
from slowly import slow_after

SIZES = dict(vocab_size=307, hidden_size=192, intermediate_size=389, num_hidden_layers=2, num_attention_heads=3)
REAL = torch.arange(37) < torch.tensor([37, 5, 23])[:, None]
COLUMNS = slice(0, None, 128)  # one in each block of 8 bits


def plant(norm, weight):
    """Outliers that ruin a layer in 8 bits alone: they multiply entries that the norm makes 0, and set the steps."""
    with torch.no_grad():
        for parameter in norm:
            parameter[COLUMNS] = 0
        weight[:, COLUMNS] = 1000


def tokens():
    return {"input_ids": torch.randint(3, 307, REAL.shape), "attention_mask": REAL.long()}


def bert():
    model = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)
    layer = model.encoder.layer[0]
    plant(layer.attention.output.LayerNorm.parameters(), layer.intermediate.dense.weight)
    return model, tokens(), "encoder.layer.0.intermediate.dense", {"min_cosine": 0.999}


def llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, eos_token_id=None, initializer_range=0.1)
    model = transformers.LlamaForCausalLM(config)
    layer = model.model.layers[1]
    plant(layer.post_attention_layernorm.parameters(), layer.mlp.gate_proj.weight)
    return model, tokens(), "model.layers.1.mlp.gate_proj", {"max_kl": 0.01}


class Encoder(nn.Module):
    """PyTorch's own encoder, whose attention holds its projections without modules."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(192, 3, 389, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src, src_key_padding_mask):
        return self.stack(src, src_key_padding_mask=src_key_padding_mask)


def torch_encoder():
    model = Encoder()
    layer = model.stack.layers[1]
    plant(layer.norm1.parameters(), layer.self_attn.in_proj_weight)
    sample = {"src": torch.randn(3, 37, 192), "src_key_padding_mask": ~REAL}
    return model, sample, "stack.layers.1.self_attn.in_proj_weight", {"min_cosine": 0.99}


def own_decoder():
    model = copy.deepcopy(saccade.models.load())
    block = model.model.decoder.blocks[2]
    plant(block.feed_forward_norm.parameters(), block.feed_forward.gate_up.weight)
    return model, tokens(), "model.decoder.blocks.2.feed_forward.gate_up", {"max_kl": 0.005}


@pytest.fixture
def planted(request):
    torch.manual_seed(0)
    model, sample, layer, bound = request.param()
    return model.eval(), sample, layer, bound


def outputs(model, sample):
    """Rows at real tokens, in float64."""
    out = model(**sample)
    for name in ("logits", "last_hidden_state"):
        out = getattr(out, name, out)
    return out[REAL].double()


def divergence(plain, other):
    p, q = plain.softmax(-1), other.softmax(-1)
    return (p * (p / q).log()).sum(-1).mean().item()


def cosines(plain, other):
    return (plain * other).sum(-1) / (plain.norm(dim=-1) * other.norm(dim=-1))


MODELS = [bert, llama, torch_encoder, own_decoder]


@pytest.mark.parametrize("planted", slow_after(1, MODELS), indirect=True, ids=[model.__name__ for model in MODELS])
@torch.no_grad()
def test_the_one_layer_that_8_bits_ruin_is_named_and_left_in_float(planted, every_size):
    model, sample, layer, bound = planted
    plain = outputs(model, sample)
    with saccade.accelerate(model, weights="int8", samples=[sample]) as run:
        ruined = outputs(model, sample)
    assert run.rounding.layers[0].name == layer
    assert not any(part.in_float for part in run.rounding.layers)
    with saccade.accelerate(model, weights="int8", samples=[sample], **bound) as run:
        for _ in range(3):  # as measured from the first call on
            kept = outputs(model, sample)
            for error, now in ((run.rounding.all_int8, ruined), (run.rounding.outputs, kept)):
                if "max_kl" in bound:
                    assert error.kl == pytest.approx(divergence(plain, now), rel=1e-3)
                    agree = (plain.argmax(-1) == now.argmax(-1)).double().mean().item()
                    assert error.agreement == pytest.approx(agree)
                else:
                    cosine = cosines(plain, now)
                    assert 1 - error.worst_cosine == pytest.approx(1 - cosine.min().item(), rel=1e-3)
                    assert 1 - error.cosine == pytest.approx(1 - cosine.mean().item(), rel=1e-3)
    assert [part.name for part in run.rounding.layers if part.in_float] == [layer]
    assert "1  linear layers left in float so that" in str(run)
    if "max_kl" in bound:
        assert divergence(plain, kept) < bound["max_kl"] < divergence(plain, ruined)
    else:
        assert cosines(plain, kept).min() > bound["min_cosine"] > cosines(plain, ruined).min()
    assert torch.equal(outputs(model, sample), plain)


def pair():
    """Two layers of which the second is the larger one, and a classifier."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 389), nn.Tanh(), nn.Linear(389, 11)).eval()


@torch.no_grad()
def test_own_errors_are_of_the_float_models_inputs_at_real_tokens(every_size):
    torch.manual_seed(0)
    model, batch = transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False).eval(), tokens()
    expected, share = {}, {}

    def compare(name):
        def hook(layer, inputs, out):
            (x,) = inputs
            wanted = (x.double() @ layer.weight.double().T + layer.bias.double())[REAL]
            weight = int8_weight(layer.weight).dense().double()
            expected[name] = (
                (rounded(x).double() @ weight.T + layer.bias.double())[REAL] - wanted
            ).norm() / wanted.norm()
            share[name] = layer.weight.numel()

        return hook

    large = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_hook(compare(name)) for name, part in large]
    model(**batch)
    for hook in hooks:
        hook.remove()
    with saccade.accelerate(model, weights="int8", samples=[batch]) as run:
        pass
    assert len(run.rounding.layers) == len(expected) == 12
    for layer in run.rounding.layers:  # a number on the edge of two steps may fall to the other side
        assert layer.error == pytest.approx(expected[layer.name].item(), rel=0.01)
        assert layer.share == pytest.approx(share[layer.name] / sum(share.values()))
        assert 0 < 1 - layer.alone.worst_cosine < 1e-3
    assert [1 - x.alone.worst_cosine for x in run.rounding.layers] == sorted(
        (1 - x.alone.worst_cosine for x in run.rounding.layers), reverse=True
    )
    assert run.rounding.rows == 65


def by_hand(model, x, in_float):
    """The model in float64, with the other layers' weights and inputs rounded."""
    x = x.double()
    for name, part in model.named_children():
        if isinstance(part, nn.Linear):
            exact = name in in_float
            weight = part.weight.double() if exact else int8_weight(part.weight).dense().double()
            x = (x if exact else rounded(x.float()).double()) @ weight.T + part.bias.double()
        else:
            x = part(x)
    return x


@pytest.mark.slow
@torch.no_grad()
def test_what_is_left_in_float_costs_little_more_than_the_best_of_all_selections():
    """By trying all of them by hand. The order is greedy: it may miss the best one."""
    torch.manual_seed(1)
    pairs = list(itertools.pairwise([192, 768, 192, 512, 211, 173]))
    model, x = nn.Sequential(*(part for pair in pairs for part in (nn.Linear(*pair), nn.GELU()))), torch.randn(67, 192)
    work = {str(2 * place): n * m / sum(n * m for n, m in pairs) for place, (n, m) in enumerate(pairs)}
    for name in work:
        model[int(name)].weight.mul_(3)
    plain = by_hand(model, x, work)
    selections = [set(names) for count in range(5) for names in itertools.combinations(work, count)]
    errors = [divergence(plain, by_hand(model, x, names)) for names in selections]
    for share in (0.9, 0.65, 0.5, 0.3, 0.25):  # 3.9 % from any selection's
        bound = share * errors[0]
        with saccade.accelerate(model, weights="int8", samples=[x], max_kl=bound) as run:
            assert divergence(plain, model(x).double()) <= bound
        left = {layer.name for layer in run.rounding.layers if layer.in_float}
        cheapest = min(
            sum(map(work.get, names)) for names, error in zip(selections, errors, strict=True) if error <= bound
        )
        assert sum(map(work.get, left)) <= 1.1 * cheapest
        assert run.rounding.outputs.kl == pytest.approx(errors[selections.index(left)], rel=0.02)
        for layer in run.rounding.layers:
            alone = divergence(plain, by_hand(model, x, work.keys() - {layer.name}))
            assert layer.alone.kl == pytest.approx(alone, rel=0.02)
            assert layer.share == pytest.approx(work[layer.name])


class Beside(nn.Module):
    """Two layers of one input: of the error 1 part is by `few`, and 4 are by `many`, which costs 10 times as much."""

    def __init__(self):
        super().__init__()
        self.few, self.many = nn.Linear(256, 128), nn.Linear(256, 1280)

    def forward(self, x):
        return torch.cat([self.few(x), 0.4**0.5 * self.many(x)], -1)


@torch.no_grad()
def test_a_cheap_layer_that_is_not_enough_is_put_back():
    torch.manual_seed(0)
    model, samples = Beside(), [torch.randn(67, 256)]
    with saccade.accelerate(model, weights="int8", samples=samples) as run:
        few = next(1 - layer.alone.worst_cosine for layer in run.rounding.layers if layer.name == "few")
        assert run.rounding.all_int8.worst_cosine < 1 - 3 * few
    with saccade.accelerate(model, weights="int8", samples=samples, min_cosine=1 - 2 * few) as run:
        assert [layer.name for layer in run.rounding.layers if layer.in_float] == ["many"]


class Masked(nn.Module):
    """A layer that computes padding as any token; what encoder and decoder are given is only read by its mask."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, 389)

    def forward(self, x, decoder_input_ids=None, **masks):
        return (self.layer(x),)


@pytest.mark.parametrize(
    "masks",
    [
        {"attention_mask": REAL.long()},
        {"src_key_padding_mask": ~REAL},
        {"src_key_padding_mask": torch.zeros(3, 37).masked_fill(~REAL, -math.inf)},
        {"attention_mask": ~REAL, "decoder_attention_mask": REAL, "decoder_input_ids": REAL.long()},
    ],
)
@torch.no_grad()
def test_padding_does_not_count(masks):
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(3, 37, 192)
    x[~REAL] = torch.randn(46, 192).exp() ** 5  # of which 8 bits hold little
    plain = model.layer(x)[REAL].double()
    got = rounded(x[REAL]).double() @ int8_weight(model.layer.weight).dense().double().T + model.layer.bias.double()
    with saccade.accelerate(model, weights="int8", samples=[{"x": x} | masks], max_kl=1.0) as run:
        pass
    (layer,) = run.rounding.layers
    assert run.rounding.rows == 65
    assert layer.error == pytest.approx(((got - plain).norm() / plain.norm()).item(), rel=0.01)
    assert run.rounding.outputs.kl == pytest.approx(divergence(plain, got), rel=0.01)
    assert 1 - run.rounding.outputs.worst_cosine == pytest.approx(1 - cosines(plain, got).min().item(), rel=0.01)


class Dropping(Masked):
    """Draws random numbers in evaluation, too."""

    def forward(self, x):
        return nn.functional.dropout(self.layer(x), 0.5, training=True)


class Reusing(Masked):
    """Gives all outputs in the same memory."""

    def forward(self, x):
        self.out = self.__dict__.get("out", torch.zeros(37, 389))
        return self.out.copy_(self.layer(x))


@pytest.mark.parametrize("kind", [Dropping, Reusing])
@torch.no_grad()
def test_random_numbers_and_memory_of_outputs_are_the_same_in_each_pass(kind):
    torch.manual_seed(0)
    model, samples = kind(), [torch.randn(37, 192), torch.randn(37, 192)]
    with saccade.accelerate(model, weights="int8", samples=samples) as run:
        pass
    assert 1e-6 < 1 - run.rounding.outputs.worst_cosine < 1e-4


@torch.no_grad()
def test_the_same_choice_each_time_and_from_the_weights_as_they_are(every_size):
    model, samples = pair(), [torch.randn(37, 192), torch.randn(5, 192)]
    run = saccade.accelerate(model, weights="int8", samples=samples, min_cosine=0.99996)
    found = []
    for _ in range(2):
        with run:
            found.append(run.rounding)
    assert found[0] == found[1]
    assert [x.name for x in found[0].layers if x.in_float]
    with saccade.accelerate(model, weights="int8", samples=samples, min_cosine=0.9) as loose:
        assert "none in float: min_cosine=0.9 holds" in str(loose)
        assert loose.rounding.passes == 4
    model[2].weight.mul_(0)
    with run:
        assert {x.name: x.error for x in run.rounding.layers}["2"] == 0
        assert [x.name for x in run.rounding.layers if x.in_float] != [x.name for x in found[0].layers if x.in_float]


def test_a_bound_that_nothing_meets_names_the_nearest_and_leaves_the_model_as_it_was():
    model, before = pair(), {}
    for name, part in model.named_modules():
        before[name] = dict(vars(part))
    x = torch.randn(37, 192)
    state = torch.get_rng_state()
    with pytest.raises(
        ValueError, match=r"max_kl=1e-13: no selection of layers .* nearest is [02] alone in int8, with KL "
    ):
        saccade.accelerate(model, weights="int8", samples=[x], max_kl=1e-13).install()
    assert all(vars(part) == before[name] for name, part in model.named_modules())
    assert torch.equal(torch.get_rng_state(), state)
    with saccade.accelerate(model, weights="int8"):
        pass


@torch.no_grad()
def test_the_metric_before_and_after():
    model, x = pair(), torch.randn(307, 192)
    plant(model[0].parameters(), model[2].weight)
    classes = model(x).argmax(-1)
    classes[:31] += 1  # some that it does not know

    def accuracy(model):
        assert not model.training
        return (model(x).argmax(-1) == classes).float().mean()

    wanted = accuracy(model)
    model.train()
    with saccade.accelerate(model, weights="int8", metric=accuracy) as run:
        model.eval()
        rough = accuracy(model)
        model.train()
    assert run.rounding.metric == pytest.approx((wanted.item(), rough.item()))
    assert run.rounding.layers[0].name == "2"
    with saccade.accelerate(model, weights="int8", metric=accuracy, max_drop=0.01) as run:
        assert [x.name for x in run.rounding.layers if x.in_float] == ["2"]
        assert run.rounding.outputs.drop <= 0.01 < run.rounding.all_int8.drop
    assert model.training


class Growing(nn.Module):
    """Reads a list that each call makes longer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, 192)

    def forward(self, x, seen):
        seen.append(self.layer(x))
        return torch.stack(seen).sum(0) + x


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, 192)

    def forward(self, x):
        return {"last_hidden_state": self.layer(x)}


X = torch.ones(2, 192)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(max_kl=0.0, samples=[X]), ValueError, "max_kl: expected a finite number above 0, got 0.0"),
        (dict(max_kl=math.nan, samples=[X]), ValueError, "max_kl: expected a finite number above 0, got nan"),
        (dict(min_cosine=1.5, samples=[X]), ValueError, "min_cosine: expected a number above -1 and at most 1"),
        (dict(min_cosine=-1, samples=[X]), ValueError, "min_cosine: expected .* got -1"),
        (dict(max_drop=-0.1, metric=len), ValueError, "max_drop: expected a finite number of 0 or more, got -0.1"),
        (dict(max_drop="1%", metric=len), ValueError, "max_drop: expected .* got '1%'"),
        (dict(max_kl=0.1), ValueError, "samples: max_kl needs inputs of the model to be measured with, got None"),
        (dict(max_drop=0.1, samples=[X]), ValueError, "metric: max_drop needs a function of the model to a number"),
        (dict(max_drop=0.1, metric=0.9), TypeError, "metric: expected a function of the model, got float"),
        (dict(samples=[]), ValueError, "samples: expected at least one input of the model, got none"),
        (dict(samples=X), TypeError, "samples: expected a list of dicts or of tensors, got Tensor"),
        (dict(samples={"input": X}), TypeError, "samples: expected a list of dicts or of tensors, got dict"),
        (dict(samples=[X, (X,)]), TypeError, r"samples\[1\]: expected a dict .* or a tensor, got tuple"),
        (dict(samples=[X], weights=None), ValueError, "weights: .* are about weights='int8', got None"),
        (dict(max_kl=0.1, samples=[X], weights="bfloat16"), ValueError, "weights: .* got 'bfloat16'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        saccade.accelerate(nn.Linear(192, 192), **({"weights": "int8"} | arguments))


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (Named, dict(samples=[X, {"y": X}]), ValueError, r"samples\[1\]: the model raises TypeError: .*'y'"),
        (Named, dict(max_kl=0.1, samples=[X]), ValueError, "max_kl: expected a model with logits, got dict without"),
        (Named, dict(samples=[X, X * math.nan]), ValueError, r"samples\[1\]: the model gives NaN in float"),
        (Growing, dict(samples=[{"x": X, "seen": []}]), ValueError, r"samples\[0\]: expected the same outputs at each"),
        (
            lambda: nn.Linear(2**15, 1),
            dict(max_kl=0.1, samples=[torch.ones(3, 2**15)]),
            ValueError,
            "two numbers or more as output",
        ),
        (lambda: nn.Linear(192, 192), dict(samples=[X[0]]), ValueError, "got Tensor; a metric= without samples"),
        (lambda: nn.Linear(192, 192), dict(metric=lambda m: math.inf), ValueError, "metric: .* finite number, got inf"),
        (lambda: nn.Linear(192, 192), dict(metric=lambda m: None), TypeError, "metric: expected a number.* NoneType"),
    ],
)
def test_what_cannot_be_measured(model, arguments, error, message):
    torch.manual_seed(0)
    module = model()
    with pytest.raises(error, match=message):
        saccade.accelerate(module, weights="int8", **arguments).install()
    with saccade.accelerate(module, weights="int8"):  # nothing is left behind
        pass


def test_padding_alone_is_no_sample():
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    nothing = {"input_ids": torch.ones(2, 7, dtype=torch.long), "attention_mask": torch.zeros(2, 7, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"samples\[1\]: expected real tokens, but the mask hides all of them"):
        saccade.accelerate(model, weights="int8", samples=[tokens(), nothing]).install()
