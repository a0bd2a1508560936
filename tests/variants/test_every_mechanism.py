"""Every mechanism there is does what its `Traits` say, and refuses with their words what they say it cannot.

Shape legend: B batch, Hq / Hkv query and key-value heads, L length, D key width, Dv value width, E model width.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch

from looped import looped
from saccade import Causal, Padding, Window
from saccade.batching import pad, unpad
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Encoder, GrowingLayer, KVCache, MultiHeadAttention
from saccade.nn._initial import begin_anew
from saccade.positions import RotaryConfig
from saccade.variants import MECHANISMS, Recurrent

B, L, WIDTH, HEADS = 3, 149, 24, 4
LENGTHS = [61, L, 8]
LOOKS_AT_SOME = {"reformer", "block-topk", "longformer"}  # their queries choose keys, so none is seen by all
EXACT = dict(rtol=1e-10, atol=1e-11)  # float64, sums in another order
CONFIGS = [mechanism.usual(L) for mechanism in MECHANISMS]


def every(which=lambda traits: True):
    chosen = [config for config in CONFIGS if which(config.traits)]
    return pytest.mark.parametrize("config", chosen, ids=[config.name for config in chosen])


def sides(traits):
    """The masks that it can do without padding."""
    return [mask for mask, able in ((None, traits.bidirectional), (Causal(), traits.causal)) if able is True]


class Read:
    """A mechanism, and inputs for it: (query, key, value), and tokens where it reads them."""

    def __init__(
        self, config, *, batch=B, length=L, keys=None, kv_heads=None, dtype=torch.float64, requires_grad=False
    ):
        self.config, attention = config, AttentionConfig(WIDTH, HEADS, kv_heads, mechanism=config)
        heads = attention.heads_for_mechanism()
        self.module = config.build(heads)
        begin_anew(self.module)
        self.module.to(dtype).eval()
        keys = length if keys is None else keys
        shape = attention.shape
        sizes = [(heads.heads, length, heads.head), (heads.kv_heads, keys, heads.head)]
        sizes.append((shape.kv_heads, keys, shape.value_head))
        inputs = [torch.randn(batch, *size, dtype=dtype) for size in sizes]
        if config.shares_key:
            inputs[1] = inputs[0].clone()
        if config.reads_tokens:
            inputs.append(torch.randn(batch, length, WIDTH, dtype=dtype))
        self.inputs = [tensor.requires_grad_(requires_grad) for tensor in inputs]

    def __call__(self, inputs=None, mask=None, **options):
        query, key, value, *tokens = self.inputs if inputs is None else inputs
        if tokens:
            options["tokens"] = tokens[0]
        return self.module(query, key, value, mask, **options)

    def changed(self, change):
        """The inputs, each passed through `change`, which sees (B, heads, L, n)."""
        return [change(x) if x.ndim == 4 else change(x[:, None])[:, 0] for x in self.inputs]


def decoder(config, layers=2, **options):
    attention = AttentionConfig(WIDTH, HEADS, mechanism=config, **options)
    return Decoder(BlockConfig(attention, hidden=16), layers).double().eval()


def refused(words):
    return pytest.raises(ValueError, match=re.escape(words))


# --- who sees whom ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every(lambda traits: traits.causal is True)
@looped("poison", [False, True])
@looped("first", [1, 37, L - 1])
def test_nothing_later_is_seen(config, first, poison):
    read = Read(config)
    out = read(mask=Causal())

    def change(x):
        later = torch.full_like(x, float("nan")) if poison else torch.randn_like(x)
        return torch.cat((x[:, :, :first], later[:, :, first:]), 2)

    torch.testing.assert_close(read(read.changed(change), Causal())[:, :, :first], out[:, :, :first], **EXACT)


@every(lambda traits: traits.causal is True)
def test_nothing_later_gets_a_gradient(config):
    read, first = Read(config, requires_grad=True), 37
    read(mask=Causal())[:, :, :first].square().sum().backward()
    for x in read.inputs:
        grad = x.grad if x.ndim == 4 else x.grad[:, None]
        assert (grad[:, :, first:] == 0).all() and grad[:, :, :first].abs().max() > 0


@every(lambda traits: traits.causal is not True)
def test_what_cannot_be_causal_says_why(config):
    with refused(config.traits.causal):
        Read(config)(mask=Causal())
    with refused(config.traits.causal):
        decoder(config)


@every(lambda traits: traits.bidirectional is not True)
def test_what_is_only_causal_says_why(config):
    with refused(config.traits.bidirectional):
        Read(config)()


def reached(read, mask, row):
    """Which values row `row` reads: bool (L,)."""
    value = read.inputs[2]
    (grad,) = torch.autograd.grad(read(mask=mask)[:, :, row].sum(), value)
    return (grad != 0).any(-1).any(1).any(0)


@every(lambda traits: traits.bidirectional is True)
def test_what_is_bidirectional_sees_both_ways(config):
    read, row = Read(config, requires_grad=True), 71
    seen = reached(read, None, row)
    assert seen[:row].any() and seen[row + 1 :].any()
    assert seen.all() or config.name in LOOKS_AT_SOME


@every(lambda traits: traits.causal is True)
def test_what_is_causal_sees_itself_and_the_past(config):
    read = Read(config, requires_grad=True)
    seen = reached(read, Causal(), L - 1)
    assert seen[L - 1] or config.shares_key
    assert seen.all() or (config.name in LOOKS_AT_SOME and seen[:-1].any())


@every(lambda traits: traits.masks is not True)
def test_masks_it_cannot_honour_are_refused(config):
    able = sides(config.traits)[0]
    with refused(config.traits.masks):
        Read(config)(mask=Window(5, 5) if able is None else Window(5, 5) & able)


@every()
def test_options_it_does_not_know_are_refused(config):
    with pytest.raises(TypeError, match="'sideways'"):
        Read(config)(mask=sides(config.traits)[0], sideways=True)


@every(lambda traits: traits.cross is not True)
def test_what_reads_no_other_sequence_says_why(config):
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=config))
    with refused(config.traits.cross):
        module(torch.randn(B, 5, WIDTH), context=torch.randn(B, 7, WIDTH))


@every(lambda traits: traits.cross is True and traits.bidirectional is True)
def test_another_sequence_is_read_whole(config):
    read = Read(config, length=13, keys=L, requires_grad=True)
    assert read().shape[2] == 13
    seen = reached(read, None, 7)
    assert seen.all() or (config.name in LOOKS_AT_SOME and seen.any())


# --- padding ----------------------------------------------------------------------------------------------------------


def of_items(read, side, poison):
    """The inputs with items of `LENGTHS`, padded with what must not be read; and each item's alone."""
    alone = [
        [x[b : b + 1, ..., :length, :].detach().clone().requires_grad_() for x in read.inputs]
        for b, length in enumerate(LENGTHS)
    ]
    padded = []
    for parts in zip(*alone, strict=True):
        rows, padding = pad([part[0].movedim(-2, 0) for part in parts], side=side, value=poison)
        padded.append(rows.movedim(1, -2).detach().requires_grad_())
    return alone, padded, padding


@pytest.mark.slow
@every()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_padded_item_is_what_it_is_alone(config, side, causal):
    mask = Causal() if causal else None
    if mask not in sides(config.traits):
        pytest.skip(str(config.traits.causal if causal else config.traits.bidirectional))
    read = Read(config)
    parameters = [p for p in read.module.parameters() if p.requires_grad]
    alone, padded, padding = of_items(read, side, float("nan"))
    outs = [read(inputs, mask) for inputs in alone]
    out = read(padded, padding if mask is None else mask & padding)
    real = unpad(out.movedim(2, 1), padding)
    for one, other in zip(real, outs, strict=True):
        torch.testing.assert_close(one, other[0].movedim(1, 0), **EXACT)
    cotangents = [torch.randn_like(one) for one in outs]
    poisoned = pad([c[0].movedim(1, 0) for c in cotangents], side=side, value=float("nan"))[0].movedim(1, 2)
    ours = torch.autograd.grad(out, [*padded, *parameters], poisoned)
    theirs = torch.autograd.grad(outs, [x for item in alone for x in item] + parameters, cotangents)
    for n in range(len(padded)):
        for b, length in enumerate(LENGTHS):
            before = L - length if side == "left" else 0
            its = torch.nn.functional.pad(theirs[b * len(padded) + n][0], (0, 0, before, L - length - before))
            torch.testing.assert_close(ours[n][b], its, **EXACT)  # 0 in the padding, not NaN
    for mine, its in zip(ours[len(padded) :], theirs[len(LENGTHS) * len(padded) :], strict=True):
        torch.testing.assert_close(mine, its, **EXACT)


@pytest.mark.slow
@every()
@looped("side", ["left", "right"])
def test_positions_are_counted_from_the_first_token(config, side):
    attention = AttentionConfig(WIDTH, HEADS, mechanism=config, positions=RotaryConfig(), head_width=6 * config.maps)
    module, mask = MultiHeadAttention(attention).double().eval(), sides(config.traits)[-1]
    x = [torch.randn(length, WIDTH, dtype=torch.float64) for length in LENGTHS]
    rows, padding = pad(x, side=side, value=float("nan"))
    for ours, row in zip(unpad(module(rows, mask, padding=padding), padding), x, strict=True):
        torch.testing.assert_close(ours, module(row[None], mask)[0], **EXACT)


@every()
def test_rows_of_padding_are_zero(config):
    mask = sides(config.traits)[0]
    padding = Padding([5, 0, L], queries=[5, 0, L])
    out = Read(config)(mask=padding if mask is None else mask & padding)
    assert (out[0, :, 5:] == 0).all() and (out[1] == 0).all() and (out[2] != 0).any()


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every(lambda traits: traits.causal is True and (traits.cached is True or traits.recurrent is True))
@pytest.mark.parametrize("sizes", [[40, 1, 1, L - 42], [L - 5, 1, 1, 1, 1, 1]], ids=["chunks", "steps"])
def test_decoding_equals_the_parallel_form(config, sizes):
    model = decoder(config)
    caches = [model.cache()]
    if config.traits.recurrent is True and config.traits.cached is True:
        caches.append(KVCache.growing(2))
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        whole = model(x)
        for cache in caches:
            parts = torch.cat([model(part, cache=cache) for part in x.split(sizes, 1)], 1)
            torch.testing.assert_close(parts, whole, **EXACT)


@pytest.mark.slow
@every(lambda traits: traits.causal is True and (traits.cached is True or traits.recurrent is True))
@pytest.mark.parametrize("side", ["left", "right"])
def test_items_of_unequal_length_decode_as_each_alone(config, side):
    model, steps = decoder(config), 2
    x = [torch.randn(length + steps, WIDTH, dtype=torch.float64) for length in LENGTHS]
    cache = model.cache()
    with torch.no_grad():
        prompt, padding = pad([row[:-steps] for row in x], side=side, value=float("nan"))
        outs = [[part] for part in unpad(model(prompt, cache=cache, padding=padding), padding)]
        for step in range(steps):
            new = model(torch.stack([row[len(row) - steps + step] for row in x])[:, None], cache=cache)
            for parts, one in zip(outs, new, strict=True):
                parts.append(one)
        for parts, row in zip(outs, x, strict=True):
            torch.testing.assert_close(torch.cat(parts), model(row[None])[0], **EXACT)


@every()
def test_a_state_is_promised_where_there_is_one(config):
    assert isinstance(Read(config).module, Recurrent) == (config.traits.recurrent is True)


@every(lambda traits: traits.cached is not True and traits.recurrent is not True)
def test_what_cannot_decode_says_why(config):
    module = MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=config))
    with refused(config.traits.cached):
        module.cache()
    with refused(config.traits.cached):
        module(torch.randn(B, 3, WIDTH), cache=GrowingLayer())


# --- shapes, dtypes, numbers ------------------------------------------------------------------------------------------


@pytest.mark.slow
@every(lambda traits: traits.grouped is True)
def test_each_query_head_reads_the_head_of_its_group(config):
    read = Read(config, kv_heads=2, requires_grad=True)
    out = read(mask=sides(config.traits)[0])
    for head in range(HEADS):
        grads = torch.autograd.grad(out[:, head].square().sum(), read.inputs[1:3], retain_graph=True)
        for grad in grads:
            own, other = grad.unflatten(1, (2, -1)).abs().amax((0, 2, 3, 4)).roll(-(head // 2))
            assert own > 0 and other == 0


@every(lambda traits: traits.grouped is not True)
def test_what_cannot_be_grouped_says_why(config):
    with refused("keys are the queries" if config.shares_key else config.traits.grouped):
        AttentionConfig(WIDTH, HEADS, 2, mechanism=config)


@every()
@looped("batch, length", [(0, 7), (2, 0), (0, 0), (2, 1)])
def test_empty_sizes(config, batch, length):
    for mask in sides(config.traits):
        read = Read(config, batch=batch, length=length, requires_grad=True)
        out = read(mask=mask)
        assert out.shape == (batch, HEADS, length, read.inputs[2].shape[3])
        if out.requires_grad:
            out.sum().backward()
        assert all(x.grad is None or torch.isfinite(x.grad).all() for x in read.inputs)


@every(lambda traits: traits.cross is True and traits.bidirectional is True)
def test_rows_that_see_nothing_are_zero(config):
    read = Read(config, length=5, keys=0, requires_grad=True)
    out = read()
    assert out.shape[2] == 5 and (out == 0).all()
    if out.requires_grad:
        out.sum().backward()
    assert all(x.grad is None or (x.grad == 0).all() for x in read.inputs)


@pytest.mark.slow
@every()
@looped("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(config, dtype):
    """No further from float64 than its inputs' and its output's rounding can carry it; and the dtype is kept."""
    for mask in sides(config.traits):
        wide = Read(config, dtype=torch.float64)
        narrow = copy.deepcopy(wide)
        narrow.module.to(dtype)
        narrow.inputs = [x.to(dtype) for x in wide.inputs]
        wide.module.load_state_dict(narrow.module.state_dict())
        wide.inputs = [x.double() for x in narrow.inputs]
        out, expected = narrow(mask=mask), wide(mask=mask)
        assert out.dtype == dtype
        scale = expected.abs().max()
        assert (out.double() - expected).abs().mean() <= 4 * torch.finfo(dtype).eps * scale


@every()
def test_autocast(config):
    mask = sides(config.traits)[0]
    read = Read(config, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = read(mask=mask)
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all()
    out.float().square().sum().backward()
    assert all(x.grad.dtype == torch.float32 and torch.isfinite(x.grad).all() for x in read.inputs)


@pytest.mark.slow
@every()
def test_extreme_norms_stay_finite(config):
    for mask in sides(config.traits):
        for factor in (1e4, 1e-18):
            read = Read(config, dtype=torch.float32)
            read.inputs = [x.mul(factor if n < 2 else 1).requires_grad_() for n, x in enumerate(read.inputs)]
            out = read(mask=mask)
            out.square().sum().backward()
            assert torch.isfinite(out).all()
            assert all(torch.isfinite(x.grad).all() for x in read.inputs)


@pytest.mark.slow
@every()
def test_the_same_input_gives_the_same_bits(config):
    for mask in sides(config.traits):
        read = Read(config, requires_grad=True)
        results = []
        for _ in range(2):
            out = read(mask=mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), read.inputs)))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@every()
def test_usual_settings_for_any_length(config):
    for length in (1, 2, 17, 300):
        usual = type(config).usual(length)
        assert type(usual) is type(config) and hash(usual) == hash(type(config).usual(length))
        out = Read(usual, batch=1, length=length)(mask=sides(config.traits)[0])
        assert out.shape[2] == length and torch.isfinite(out).all()


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every()
def test_a_stack_learns_a_step(config):
    attention = AttentionConfig(WIDTH, HEADS, mechanism=config)
    make = Encoder if config.traits.bidirectional is True else Decoder
    model, x = make(BlockConfig(attention, hidden=16), 2), torch.randn(B, 41, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        torch.manual_seed(3)  # what is random in training is the same in both steps
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@every()
def test_weights_are_saved_and_drawn_anew(config):
    first, second = (MultiHeadAttention(AttentionConfig(WIDTH, HEADS, mechanism=config)).eval() for _ in range(2))
    second.load_state_dict(first.state_dict())
    x, mask = torch.randn(B, 31, WIDTH), sides(config.traits)[0]
    torch.testing.assert_close(second(x, mask), first(x, mask))
    first.reset_parameters()
    assert not torch.allclose(first(x, mask), second(x, mask))


@every()
def test_a_module_made_without_memory_is_loaded_or_drawn(config):
    attention = AttentionConfig(WIDTH, HEADS, mechanism=config)
    with torch.device("meta"):
        loaded, drawn = MultiHeadAttention(attention).eval(), MultiHeadAttention(attention).eval()
    real = MultiHeadAttention(attention).eval()
    loaded.load_state_dict(real.state_dict(), assign=True)
    drawn.to_empty(device="cpu").reset_parameters()
    x, mask = torch.randn(B, 31, WIDTH), sides(config.traits)[0]
    torch.testing.assert_close(loaded(x, mask), real(x, mask))
    assert torch.isfinite(drawn(x, mask)).all()
