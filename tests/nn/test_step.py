"""A decoder's step of one token as one native call gives what its modules give, and only where nobody looks inside."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import saccade
from native.test_groups import FORMS as GROUPED, made
from saccade import Padding, Window
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Int8Rows
from saccade.operator._backends.native import _kernels
from saccade.operator._products import unrounded
from saccade.operator.nn import _step
from saccade.operator.nn._linear import packed_weights
from saccade.operator.nn._rounded import FORMS, Rounding
from saccade.positions import RotaryConfig, YaRNScaling

pytestmark = pytest.mark.skipif(_kernels.module is None, reason="no native kernels")


@contextlib.contextmanager
def native_steps():
    """Counts the steps that were computed natively."""
    original, taken = _step.run, []

    def run(*args):
        out = original(*args)
        taken.append(out)
        return out

    _step.run = run
    try:
        yield taken
    finally:
        _step.run = original


def perturbed(decoder):
    """Weights of norms and biases begin as 1 and 0, which hide that they are read at the wrong place."""
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return decoder.eval()


ATTENTION = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([2, 6]),
        "kv_heads": st.sampled_from([1, 2]),
        "head_width": st.sampled_from([6, 10, 32]),
        "value_head_width": st.sampled_from([None, 7, 33]),
        "bias": st.booleans(),
        "output_bias": st.booleans(),
        "positions": st.sampled_from(
            [
                None,
                RotaryConfig(),
                RotaryConfig(layout="interleaved", turned=4),
                RotaryConfig(turned=2, scaling=YaRNScaling(4.0, 8)),
            ]
        ),
        "qk_norm": st.sampled_from([None, "rms", "layer"]),
        "sink": st.booleans(),
        "window": st.sampled_from([None, Window(2, 0), Window(None, 0), Window(3, 1)]),
        "scale": st.sampled_from([None, 0.7]),
        "softcap": st.sampled_from([None, 1.5]),
    }
)
BLOCK = st.fixed_dictionaries(
    {
        "hidden": st.sampled_from([0, 23, 64]),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "relu", "silu", "geglu", "geglu_tanh", "reglu", "swiglu"]),
        "norm": st.sampled_from(["layer", "rms"]),
        "placement": st.sampled_from(["pre", "parallel"]),
        "bias": st.booleans(),
        "eps": st.sampled_from([1e-6, 0.1]),
    }
)


@given(
    st.sampled_from([29, 37, 64]),
    ATTENTION,
    BLOCK,
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**16),
)
def test_a_step_is_as_near_to_float64_as_the_modules_are(width, attention, block, items, unequal, dtype, seed):
    """Tokens after a prompt, of unequal length or not, with tokens taken back and items reordered on the way."""
    torch.manual_seed(seed)
    decoder = perturbed(Decoder(BlockConfig(AttentionConfig(width, eps=1e-5, **attention), **block), 2)).to(dtype)
    exact = copy.deepcopy(decoder).double()
    padding = Padding([5] + [3] * (items - 1)) if unequal else None
    tokens = torch.randn(items, 5, width).to(dtype)
    models = decoder, decoder, exact
    caches = [model.cache() for model in models]
    order = torch.randperm(items)
    with torch.no_grad(), native_steps() as taken:
        for model, cache in zip(models, caches, strict=True):
            model(tokens.to(model.norm.weight.dtype), padding=padding, cache=cache)
        for step in range(4):
            x = torch.randn(items, 1, width).to(dtype)
            got = decoder(x, cache=caches[0])
            plain = decoder(x, cache=caches[1], hidden_states=[])
            want = exact(x.double(), cache=caches[2])
            assert len(taken) == step + 1
            rounded = (plain - want).abs().max()  # of sums of up to 64 terms in some 20 products, one after another
            assert (got - want).abs().max() <= 4 * rounded + 64 * torch.finfo(dtype).eps * want.abs().max() / 16
            for cache in caches:
                if step == 1:
                    cache.rollback(1)
                cache.reorder(order)


@given(
    ATTENTION,
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**16),
)
def test_a_cache_in_8_bits_is_read_and_written_as_by_the_modules(attention, items, unequal, dtype, seed):
    """From equal caches, with tokens taken back and items reordered. A byte of the first layer's new row may fall to
    the other side; in the second layer more may, for attention in the first one has read it.
    """
    torch.manual_seed(seed)
    decoder = perturbed(Decoder(BlockConfig(AttentionConfig(37, eps=1e-5, **attention), hidden=23, eps=1e-5), 2)).to(
        dtype
    )
    cache, order = saccade.nn.KVCache.growing(2, dtype="int8"), torch.randperm(items)
    with torch.no_grad(), native_steps() as taken:
        decoder(
            torch.randn(items, 5, 37).to(dtype),
            padding=Padding([5] + [3] * (items - 1)) if unequal else None,
            cache=cache,
        )
        for step in range(4):
            x, theirs = torch.randn(items, 1, 37).to(dtype), copy.deepcopy(cache)
            got, want = decoder(x, cache=cache), decoder(x, cache=theirs, hidden_states=[])
            assert len(taken) == step + 1
            assert torch.allclose(got, want, atol=want.abs().max().item() / (60 if dtype is torch.float32 else 15))
            for ours, others in zip(cache.layers, theirs.layers, strict=True):
                for name in ("_key", "_value"):
                    rows = [Int8Rows(getattr(one, name)[:, :, : int(max(one.lengths()))]) for one in (ours, others)]
                    scale = rows[1].data[..., -4:].contiguous().view(torch.float32).clamp(min=1e-30)
                    far = (rows[0].floats(torch.float32) - rows[1].floats(torch.float32)).abs() / scale
                    assert far.max() <= (1.01 if dtype is torch.float32 and ours is cache[0] else 4)
                    assert (far > 0.5).float().mean() < 0.05 or dtype is torch.bfloat16
            cache.rollback(step % 2)
            cache.reorder(order)


def small(**options):
    torch.manual_seed(0)
    config = AttentionConfig(32, 4, 2, positions=RotaryConfig(), **options)
    return perturbed(Decoder(BlockConfig(config, hidden=48, dropout=0.1), 2))


def begun(decoder, items=2):
    cache = decoder.cache()
    with torch.no_grad():
        decoder(torch.randn(items, 5, 32, generator=torch.Generator().manual_seed(1)), cache=cache)
    return cache


X = torch.randn(2, 1, 32, generator=torch.Generator().manual_seed(2))


def by_modules(decoder):
    """What the modules give, from a cache that they filled."""
    with torch.no_grad():
        return decoder(X, cache=begun(decoder), hidden_states=[])


def hooked(decoder):
    decoder.blocks[1].feed_forward.down.register_forward_hook(lambda module, args, out: 2 * out)


def hooked_before(decoder):
    decoder.blocks[0].attention.key_norm.register_forward_pre_hook(lambda module, args: (args[0],))


def hooked_positions(decoder):
    decoder.positions.register_forward_hook(lambda module, args, out: 2 * out)


def with_a_forward(decoder):
    layer = decoder.blocks[0].feed_forward
    layer.forward = lambda x: 3 * x


def adapted(decoder):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.up = base, nn.Linear(32, 32)

        weight = property(lambda self: self.base.weight)

        def forward(self, x):
            return self.base(x) + self.up(x)

    decoder.blocks[1].attention.output = Adapted(decoder.blocks[1].attention.output)


def subclassed(decoder):
    class Doubled(type(decoder.blocks[0])):
        def forward(self, x, *args, **kwargs):
            return 2 * super().forward(x, *args, **kwargs)

    decoder.blocks[0].__class__ = Doubled


def training(decoder):
    decoder.blocks[0].train()


def sees_everything(decoder):
    decoder.causal = False


@pytest.mark.parametrize(
    "change",
    [hooked, hooked_before, hooked_positions, with_a_forward, adapted, subclassed, training, sees_everything],
    ids=lambda change: change.__name__,
)
def test_what_is_changed_is_computed_by_the_modules(change):
    """After steps without the change: nothing of them is remembered."""
    decoder = small()
    cache = begun(decoder)
    with torch.no_grad(), native_steps() as taken:
        decoder(X, cache=cache)
        assert len(taken) == 1
        change(decoder)
        torch.manual_seed(4)
        got = decoder(X, cache=begun(decoder))
        assert len(taken) == 1
        torch.manual_seed(4)
        assert torch.equal(got, by_modules(decoder))


def test_whoever_observes_differentiates_or_packs_gets_the_modules():
    """A watch does not: tests/monitoring/test_steps.py."""
    decoder, seen = small(), []
    with native_steps() as taken:
        with torch.no_grad():
            decoder(X, cache=begun(decoder), observe=lambda layer, call: seen.append(layer))
        assert seen == [0, 1]
        decoder(X, cache=begun(decoder)).sum().backward()
        assert all(parameter.grad is not None for parameter in decoder.parameters())
        with torch.no_grad(), packed_weights(decoder):
            decoder(X, cache=begun(decoder))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            decoder(X, cache=begun(decoder))
        for cache in (saccade.nn.KVCache.static(2, 9), saccade.nn.KVCache.window(2, 3), decoder.cache()):
            with torch.no_grad():
                decoder(X, cache=cache)
                decoder(X, cache=cache, mask=Window(1, 0))
        assert not taken


def test_edits_between_two_tokens_are_seen():
    decoder = small()
    layer, square = decoder.blocks[1].feed_forward.down, decoder.blocks[1].attention.output
    with torch.no_grad(), native_steps() as taken:
        for edit in (
            lambda: layer.weight.mul_(2),
            lambda: layer.weight.data.mul_(2),  # which PyTorch does not count
            lambda: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
            lambda: setattr(decoder, "norm", nn.Identity()),
            lambda: setattr(square.weight, "data", square.weight.data.t()),  # the same memory
            lambda: setattr(square.weight, "data", square.weight.data.t()),
            lambda: setattr(square.weight, "data", torch._neg_view(square.weight.data)),
            lambda: setattr(square.weight, "data", square.weight.data.resolve_neg()),
            lambda: setattr(decoder.blocks[0], "config", replace(decoder.blocks[0].config, cross=None)),
            lambda: decoder.blocks.__delitem__(0),
            lambda: setattr(layer.weight, "data", torch.randn(48, 32).t()),
        ):
            edit()
            cache = saccade.nn.KVCache.growing(len(decoder.blocks))
            tokens = torch.randn(2, 5, 32)
            decoder(tokens, cache=cache)
            got, want = decoder(X, cache=cache), decoder(torch.cat((tokens, X), 1))[:, -1:]
            assert torch.allclose(got, want, atol=1e-5)
        assert len(taken) == 8  # a weight that lies transposed or is negated is multiplied by the module


def test_wrong_input_raises_as_before_and_changes_nothing():
    decoder = small()
    cache = begun(decoder)
    with torch.no_grad():
        for x, error in ((torch.randn(2, 1, 31), ValueError), (X.double(), TypeError), (X[:1], ValueError)):
            with pytest.raises(error):
                decoder(x, cache=cache)
        assert cache.length == 5
        decoder.blocks[0].feed_forward.down.weight = nn.Parameter(torch.randn(32, 47))
        with pytest.raises(RuntimeError):
            decoder(X, cache=cache)
        assert cache.length == 5


def test_in_8_bits_a_step_follows_the_modules_and_what_is_not_finite():
    torch.manual_seed(0)
    config = BlockConfig(AttentionConfig(192, 6, positions=RotaryConfig()), hidden=256)
    decoder = perturbed(Decoder(config, 2))
    prompt, x = torch.randn(3, 5, 192), torch.randn(3, 1, 192)
    odd = x.clone()
    odd[1, 0, 7] = torch.inf

    def close(got, want):
        # A byte may fall to the other side where norms differ in the last bit: one step of 255 in sums of 192 to 256.
        assert torch.allclose(got, want, atol=want.abs().max().item() / 255)

    with torch.no_grad(), saccade.accelerate(decoder, weights="int8"), native_steps() as taken:
        caches = decoder.cache(), decoder.cache()
        for cache in caches:
            decoder(prompt, cache=cache)
        for edits in range(2):
            got, want = decoder(x, cache=caches[0]), decoder(x, cache=caches[1], hidden_states=[])
            assert len(taken) == edits + 1
            close(got, want)
            decoder.blocks[0].feed_forward.down.weight.mul_(2)
        got, want = decoder(odd, cache=caches[0]), decoder(odd, cache=caches[1], hidden_states=[])
        assert len(taken) == 2
        assert torch.equal(got.isnan(), want.isnan()) and got[1].isnan().any() and got[0].isfinite().all()
        assert caches[0].length == 8


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "Q4_K", "Q6_K", "gptq, 8 bits"])
def test_layers_that_hold_few_bits_step_natively(form):
    """A byte of an activation may fall to the other side: one step of 255 in sums of 192 to 256 terms."""
    torch.manual_seed(0)
    decoder = perturbed(Decoder(BlockConfig(AttentionConfig(192, 6, positions=RotaryConfig()), hidden=256), 2))
    rounding = Rounding(decoder, form if form in FORMS else "stored")
    for name, (features, width) in rounding.shapes().items():
        if form in FORMS:
            rounding.round(name)
        else:
            weight, _ = made(GROUPED[form], features, width, lambda shape: torch.randn(shape) * 1e-3)
            rounding.hold(name, weight, form)
    prompt, x = torch.randn(3, 5, 192), torch.randn(3, 1, 192)
    with torch.no_grad(), native_steps() as taken:
        caches = decoder.cache(), decoder.cache()
        for cache in caches:
            decoder(prompt, cache=cache)
        got, want = decoder(x, cache=caches[0]), decoder(x, cache=caches[1], hidden_states=[])
        assert len(taken) == 1
        assert torch.allclose(got, want, atol=want.abs().max().item() / 255)
        with unrounded():
            got, want = decoder(x, cache=caches[0]), decoder(x, cache=caches[1], hidden_states=[])
        assert len(taken) == 2
        assert torch.allclose(got, want, atol=want.abs().max().item() / 255)


def test_tokens_behind_a_rollback_do_not_reach_what_was_handed_out():
    """A buffer that is full is copied: views of the old one stay."""
    decoder = small()
    cache = begun(decoder)
    held = cache[0]._key[:, :, :5]
    before = held.clone()
    with torch.no_grad(), native_steps() as taken:
        for _ in range(40):
            decoder(X, cache=cache)
    assert len(taken) == 40 and cache.length == 45
    assert torch.equal(held, before) and torch.equal(cache[0]._key[:, :, :5], before)
