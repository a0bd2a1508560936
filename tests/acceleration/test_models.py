"""Inside `accelerate(model)` a model gives what it gives outside, by the modules it is made of, and is put back."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.acceleration import _joined_projections
from saccade.operator._products import dtypes

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")
SIZES = dict(hidden_size=192, num_hidden_layers=2, num_attention_heads=6, intermediate_size=424, vocab_size=101)
REAL = torch.arange(37) < torch.tensor([37, 20, 9])[:, None]


def tokens():
    torch.manual_seed(1)
    return {"input_ids": torch.randint(101, (3, 37)), "attention_mask": REAL.long()}


class Encoder(nn.Module):
    """PyTorch's own layers, called as transformers' models are."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(101, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 424, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask):
        return (self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0),)


def bert(**settings):
    return transformers.BertModel(transformers.BertConfig(**SIZES, **settings), add_pooling_layer=False)


def gpt2():
    config = transformers.GPT2Config(n_embd=192, n_layer=2, n_head=6, n_inner=424, vocab_size=101, use_cache=False)
    return transformers.GPT2Model(config)


def llama(cls="Llama", **settings):
    config = getattr(transformers, f"{cls}Config")(**SIZES, num_key_value_heads=2, use_cache=False, **settings)
    return getattr(transformers, f"{cls}Model")(config)


def t5():
    config = transformers.T5Config(d_model=192, d_kv=32, d_ff=424, num_layers=2, num_heads=6, vocab_size=101)
    return transformers.T5EncoderModel(config)


# What is taken of two layers, by kind.
FAMILIES = {
    "BERT": (bert, {"linear": 12, "linear and activation": 2, "linear, sum and norm": 4, "layer without padding": 2}),
    "GPT-2": (gpt2, {"linear": 8, "feed-forward": 2, "decoder layer": 2}),
    "Llama": (llama, {"linear": 10, "gated feed-forward": 2, "RMS norm": 5, "decoder layer": 2}),
    "T5": (t5, {"linear": 12, "feed-forward": 2, "RMS norm": 5}),  # its scores between tokens cannot be packed
    "a window": (lambda: llama("Mistral", sliding_window=5), {"linear": 10, "gated feed-forward": 2, "RMS norm": 5}),
    "1 + weight": (
        lambda: llama("Gemma", head_dim=32),  # its norm looks like Llama's
        {"linear": 10, "gated feed-forward": 2, "RMS norm": 5, "decoder layer": 2},
    ),
    "PyTorch": (
        Encoder,
        {"linear": 4, "feed-forward": 2, "nn.MultiheadAttention": 2, "layer without padding": 2},
    ),
}


def made(name):
    torch.manual_seed(0)
    return FAMILIES[name][0]().eval()


def taken(run):
    """Modules computed another way, by kind. A linear layer inside a fused module is called by nobody."""
    kinds = {}
    for layer in run._model.layers:
        if layer.state == "taken":
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
    return kinds


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_outputs_are_the_same_and_the_model_is_put_back(name):
    """The float64 model says what is right: both are off by rounding of some 10 sums of at most 424 terms."""
    model, batch = made(name), tokens()
    exact = copy.deepcopy(model).double()(**batch)[0]
    before = model(**batch)[0]
    allowed = 10 * 424 * 2.0**-24 * float(exact.abs().max())
    with saccade.accelerate(model) as run:
        for _ in range(2):  # the first call is computed both ways
            assert float((model(**batch)[0] - exact)[REAL].abs().max()) <= allowed
        assert taken(run) == FAMILIES[name][1]
    assert torch.equal(model(**batch)[0], before)
    assert not any("forward" in vars(part) or "_ff_block" in vars(part) for part in model.modules())


class Lying(nn.Module):
    """Made of what a sum and a norm are made of, and something else."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(256, 192), nn.LayerNorm(192)

    def forward(self, x, y):
        return self.norm(self.dense(x) - y)


@torch.no_grad()
def test_what_gives_something_else_than_its_structure_says_keeps_its_own_way():
    torch.manual_seed(0)
    module, x, y = Lying(), torch.randn(3, 11, 256), torch.randn(3, 11, 192)
    expected = module(x, y)
    with saccade.accelerate(module) as run:
        for _ in range(2):
            torch.testing.assert_close(module(x, y), expected)
    assert "gives something else than its structure says" in run.explain()


def test_what_was_called_and_not_taken_says_why():
    """A forgotten `no_grad` is the usual reason for no gain."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, batch_first=True), 2), torch.randn(2, 11, 256)

    def told():
        with saccade.accelerate(model) as run:
            model(x)
        lines = [line.partition(": ")[2].partition(", ") for line in run.explain(every=True).splitlines()[:10]]
        found = {kind: reason for kind, _, reason in lines}
        return [found[kind] for kind in ("linear", "feed-forward", "nn.MultiheadAttention", "layer without padding")]

    gradients = "was called with gradients on; inference needs torch.no_grad()"
    assert told() == [gradients] * 4
    dropout = "dropout is active; inference needs eval()"
    unpadded = "no padded batch came (10% padding or more, and no other mask)"
    with torch.no_grad():
        assert told() == ["taken", dropout, dropout, unpadded]
        model.eval()
        assert told() == ["taken", "taken", "taken", unpadded]
        with torch.autocast("cpu", torch.bfloat16):
            assert told() == ["was called under a compiler, a transform, a mode or autocast"] * 4
        model.layers[1].linear1.register_forward_hook(lambda *_: None)
        assert told() == ["taken", "a forward hook is set inside", "taken", unpadded]


@torch.no_grad()
def test_a_changed_weight_and_a_hook_inside_are_seen():
    model, batch, seen = made("BERT"), tokens(), []
    layer = model.encoder.layer[0].intermediate
    with saccade.accelerate(model):
        model(**batch), model(**batch)
        layer.dense.weight.mul_(2)
        changed = model(**batch)[0]
        layer.dense.register_forward_hook(lambda part, given, out: seen.append(out))
        model(**batch)
    torch.testing.assert_close(changed[REAL], model(**batch)[0][REAL], rtol=1e-3, atol=1e-4)
    assert len(seen) == 2 and bool((seen[0] < -0.2).any())  # before the GELU, which is never below -.17


class Projections(nn.Module):
    """Queries of one tensor, keys and values of that or another."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(192, 193), nn.Linear(192, 211), nn.Linear(192, 229)

    def forward(self, x, context, spoil=False):
        query, key = self.query(x), self.key(context)
        return query, key, self.value(context.mul_(2) if spoil else context)


@torch.no_grad()
def test_layers_that_read_one_tensor_are_one_product_and_others_their_own(monkeypatch):
    torch.manual_seed(0)
    widths, multiply = [], _joined_projections.multiply
    monkeypatch.setattr(_joined_projections, "multiply", lambda *args: widths.append(multiply(*args)) or widths[-1])
    module, x, context = Projections(), torch.randn(2, 11, 192), torch.randn(2, 13, 192)
    plain = copy.deepcopy(module)

    def same(*given):
        for out, expected in zip(module(*given), plain(*(copy.copy(one) for one in given)), strict=True):
            torch.testing.assert_close(out, expected)

    with saccade.accelerate(module):
        for _ in range(3):
            same(x, x)
        assert widths[-1].shape[-1] == 193 + 211 + 229
        same(x, context), same(x, x)
        changed = x.clone()
        torch.testing.assert_close(module(changed, changed, True)[2], plain.value(2 * x))
        for one in (module, plain):
            one.key.weight.mul_(3), one.value.bias.add_(1)
        same(x, x)


@pytest.mark.parametrize("rows", [1, 2, 7, 37])
@torch.no_grad()
def test_a_row_has_the_same_bits_whatever_stands_beside_it(rows):
    """Long sums, where oneDNN adds one row alone in another order."""
    torch.manual_seed(0)
    ups, x = nn.Linear(3072, 193), torch.randn(211, 3072)
    with saccade.accelerate(ups):
        whole = ups(x)
        assert torch.equal(ups(x[:rows]), whole[:rows])


@torch.no_grad()
def test_dropped_weights_come_back_bit_for_bit():
    model, batch = made("GPT-2"), tokens()
    before, expected = {name: weight.clone() for name, weight in model.state_dict().items()}, model(**batch)[0]
    with saccade.accelerate(model, keep_weights=False):
        for _ in range(2):
            torch.testing.assert_close(model(**batch)[0][REAL], expected[REAL], rtol=1e-4, atol=1e-5)
        assert model.h[0].mlp.c_fc.weight.isnan().all()
        assert model.h[0].mlp.c_fc.weight.untyped_storage().nbytes() == 4
        with pytest.raises(RuntimeError, match="weights were dropped"):
            model.state_dict()
        with torch.enable_grad(), pytest.raises(RuntimeError, match="weight was dropped"):
            model(**batch)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def test_rounded_weights_are_multiplied_in_float32():
    """As a model whose weights are rounded to bfloat16: few rows by a kernel, many by a product."""
    torch.manual_seed(0)
    layer = nn.Linear(384, 211)
    rounded = copy.deepcopy(layer).double()
    rounded.weight.copy_(layer.weight.bfloat16())
    with saccade.accelerate(layer, weights="bfloat16"):
        for rows in (1, 5, 8, 9, 64):
            x = torch.randn(rows, 384)
            terms = x.double().abs() @ rounded.weight.abs().T + 1
            assert ((layer(x) - rounded(x.double())).abs() <= 385 * 2**-24 * terms).all()


def test_gradients_of_a_training_step():
    """Against float64; the float32 model without Saccade is off by as much."""
    model, batch = made("Llama").train(), tokens()
    exact = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)

    def gradients(one):
        one.zero_grad()
        one(**batch)[0][REAL].pow(2).mean().backward()
        return {name: weight.grad.double() for name, weight in one.named_parameters() if weight.grad is not None}

    right, usual = gradients(exact), gradients(plain)
    with saccade.accelerate(model):
        ours = gradients(model)
    assert right.keys() == ours.keys()
    for name, grad in right.items():
        unit = 2.0**-24 * float(grad.abs().max())
        off, usually = float((ours[name] - grad).abs().max()), float((usual[name] - grad).abs().max())
        assert off <= 4 * usually + 4 * unit, name


@torch.no_grad()
def test_attention_that_forms_its_weights_is_not_packed():
    model, batch = bert(attn_implementation="eager").eval(), tokens()
    expected = model(**batch)[0]
    with saccade.accelerate(model) as run:
        for _ in range(2):
            torch.testing.assert_close(model(**batch)[0], expected, rtol=1e-3, atol=1e-4)
    assert "layer without padding: calls no F.scaled_dot_product_attention" in str(run)


@torch.no_grad()
def test_another_thread_computes_padded_batches_too():
    model, batch, found = made("BERT"), tokens(), []
    expected = model(**batch)[0]

    @torch.no_grad()
    def compute():
        found.append(model(**batch)[0])

    with saccade.accelerate(model):
        model(**batch)
        thread = threading.Thread(target=compute)
        thread.start(), thread.join()
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-4)


class Crossing(nn.Module):
    """A layer that attends to another sequence, if there is one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(192, 192)

    def forward(self, hidden_states, attention_mask=None, encoder_hidden_states=None):
        x = hidden_states + self.mix(attended(hidden_states, hidden_states, attention_mask))
        return x if encoder_hidden_states is None else x + attended(x, encoder_hidden_states, None)


def attended(x, y, mask):
    heads = [one.unflatten(-1, (6, 32)).transpose(1, 2) for one in (x, y, y)]
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_another_sequence_of_as_many_tokens_is_not_packed_with_them():
    """Proved without it, and then wrong with it, would be wrong in silence."""
    torch.manual_seed(0)
    stack = nn.ModuleList([Crossing(), Crossing()])
    x, other, mask = torch.randn(3, 37, 192), torch.randn(3, 37, 192), REAL[:, None, None]

    def run(*context):
        out = x
        for layer in stack:
            out = layer(out, mask, *context)
        return out[REAL]

    expected = run(), run(other)
    with saccade.accelerate(stack) as whole:
        for _ in range(2):
            torch.testing.assert_close(run(), expected[0])
        assert taken(whole)["layer without padding"] == 2
        torch.testing.assert_close(run(other), expected[1])


class Odd(nn.Module):
    """A layer that knows its batch's size, which one row of tokens has not."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(192, 192)

    def forward(self, hidden_states, attention_mask=None):
        return self.mix(attended(hidden_states, hidden_states, attention_mask)) + torch.ones(3, 37, 192)


@torch.no_grad()
def test_a_layer_that_needs_its_batch_and_masks_of_other_numbers_stay_as_they_are():
    torch.manual_seed(0)
    stack, x = nn.ModuleList([Odd(), Odd()]), torch.randn(3, 37, 192)
    expected = stack[0](x, REAL[:, None, None])
    with saccade.accelerate(stack) as run:
        torch.testing.assert_close(stack[0](x, REAL[:, None, None]), expected)
        with pytest.raises(RuntimeError):  # PyTorch's own: F.sdpa takes no such mask
            stack[1](x, REAL[:, None, None].long())
    assert "raises" in run.explain()


@torch.no_grad()
def test_rounded_weights_of_a_half_precision_model_are_its_own():
    """The kernel for few rows reads float32: a bfloat16 model has nothing to round."""
    torch.manual_seed(0)
    layer, x = nn.Linear(384, 211).bfloat16(), torch.randn(3, 384, dtype=torch.bfloat16)
    expected = layer(x)
    with saccade.accelerate(layer, weights="bfloat16"):
        torch.testing.assert_close(layer(x), expected)


@torch.no_grad()
def test_a_mask_with_a_hole_is_computed_as_it_is():
    model, batch = made("BERT"), tokens()
    batch["attention_mask"][0, 3:9] = 0
    expected = model(**batch)[0]
    with saccade.accelerate(model):
        for _ in range(2):
            torch.testing.assert_close(model(**batch)[0], expected, rtol=1e-3, atol=1e-4)


def test_generation_with_a_cache_writes_the_same_tokens():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, eos_token_id=None))
    batch = {name: x.flip(1) for name, x in tokens().items()}  # padded on the left
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    expected = model.eval().generate(**batch, **options)
    with saccade.accelerate(model):
        assert torch.equal(model.generate(**batch, **options), expected)


def test_wrong_arguments():
    layer = nn.Linear(192, 192)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got list"):
        saccade.accelerate([layer])
    with pytest.raises(ValueError, match=r"weights: expected None, 'bfloat16' or 'int8', got 'int4'"):
        saccade.accelerate(layer, weights="int4")
    with pytest.raises(ValueError, match=r"keep_weights: expected True with weights='bfloat16'"):
        saccade.accelerate(layer, weights="bfloat16", keep_weights=False)
    with pytest.raises(ValueError, match=r"model: weights= and keep_weights= need a module"):
        saccade.accelerate(keep_weights=False)
    with saccade.accelerate(layer), pytest.raises(RuntimeError, match="model: it is accelerated already"):
        saccade.accelerate(layer).install()
    assert "forward" not in vars(layer)


def test_double_backward_of_a_product():
    """Second derivatives of sum of (x W^T)^2 are 2 W^T W, whatever computes the first."""
    torch.manual_seed(0)
    layer, x = nn.Linear(193, 211, bias=False), torch.randn(13, 193, requires_grad=True)
    with saccade.accelerate(layer):
        (first,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[0, 0], x)
    weight = layer.weight.double()
    torch.testing.assert_close(second[0].double(), 2 * (weight.T @ weight)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first, 2 * F.linear(F.linear(x, layer.weight), layer.weight.T), rtol=1e-4, atol=1e-4)
