"""Methods that `accelerate(model)` sets on modules: kept by others, copied, pickled, exported."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from feed_forwards import WIDTH, FeedForward, agree, fused_in
from saccade.acceleration._fused_layers import FusedLayer
from saccade.operator._products import dtypes

pytestmark = pytest.mark.skipif(not dtypes(), reason="PyTorch without oneDNN")


@pytest.mark.parametrize("unwrapped", ["inside", "after"])
def test_a_forward_wrapped_inside_the_block_and_unwrapped(unwrapped):
    """As hooks of the package accelerate do: they keep what `module.forward` was and set it again."""
    torch.manual_seed(0)
    model, x = FeedForward().eval(), torch.randn(3, 37, WIDTH)
    exact = copy.deepcopy(model).double()(x.double())

    def unwrap():
        model.up.forward = model.up._old_forward
        del model.up._old_forward

    with torch.no_grad():
        with saccade.accelerate(model):
            kept = model.up.forward
            model.up._old_forward = model.up.forward
            model.up.forward = lambda x: model.up._old_forward(x)
            copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model.down))
            assert not fused_in(copied) and copied.up._old_forward.__self__ is copied.up
            assert not fused_in(pickled)
            agree(model(x), exact)
            if unwrapped == "inside":
                unwrap()
                agree(model(x), exact)
            with pytest.raises(RuntimeError, match="accelerated already"):
                saccade.accelerate(model).install()
        if unwrapped == "after":
            unwrap()
        assert not fused_in(model)
        model.up.kept = kept  # by somebody else, who sets it later
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not fused_in(other)
            other.up.weight.zero_(), other.up.bias.zero_()
            assert other.up.kept(x).count_nonzero() == other.up(x).count_nonzero() == 0
        model.up.weight.data.mul_(2)
        torch.testing.assert_close(kept(x), F.linear(x, model.up.weight, model.up.bias), rtol=0, atol=0)
        model.up.forward = kept
        del model.up.kept
        with saccade.accelerate(model) as run:
            agree(model(x), copy.deepcopy(model).double()(x.double()))
            assert "feed-forward, taken" in run.explain()


def test_dropped_weights_behind_a_wrapper_are_not_copied():
    model = FeedForward().eval()
    with saccade.accelerate(model, keep_weights=False):
        model.up._old_forward = model.up.forward
        model.up.forward = lambda x: model.up._old_forward(x)
        with pytest.raises(RuntimeError, match="up: its weight was dropped"):
            copy.deepcopy(model.up)


@pytest.mark.parametrize("part", ["", "up"])
def test_a_forward_inside_the_block_is_still_a_method(part):
    module = FeedForward().eval()
    owner = module.get_submodule(part)
    plain = owner.forward
    with saccade.accelerate(module):
        method = owner.forward
        assert isinstance(method, FusedLayer)
        assert inspect.signature(method) == inspect.signature(plain)
        for name in ("__self__", "__func__", "__code__", "__globals__", "__name__", "__qualname__", "__defaults__"):
            assert getattr(method, name) is getattr(plain, name)
        assert not hasattr(method, "_torchdynamo_disable")


def doubled(function, kind):
    def new(*args, **named):
        out = function(*args, **named)
        return 2 * out if kind is None or isinstance(args[0], kind) else out

    return new


CALLED = {
    "a module's call": (nn.Module, "__call__", nn.Linear),
    "what that calls": (nn.Module, "_call_impl", nn.GELU),
    "a class's call": (nn.Linear, "__call__", nn.Linear),
    "F.linear": (F, "linear", None),
    "F.gelu": (F, "gelu", None),
}


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("name", CALLED)
@torch.no_grad()
def test_what_every_module_calls_is_replaced(monkeypatch, name, when):
    torch.manual_seed(0)
    owner, attribute, kind = CALLED[name]
    module, x = FeedForward().eval(), torch.randn(3, 37, WIDTH)
    plain, new = copy.deepcopy(module), doubled(getattr(owner, attribute), kind)
    if when == "before":
        monkeypatch.setattr(owner, attribute, new)
    with saccade.accelerate(module):
        module(x), module(x)
        monkeypatch.setattr(owner, attribute, new)
        torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4)
        monkeypatch.undo()
        torch.testing.assert_close(module(x), plain(x), rtol=1e-4, atol=1e-4)


def test_a_shallow_copy_inside_the_block():
    """It shares the module's parts, until they are replaced in either."""
    torch.manual_seed(0)
    module, x = FeedForward().eval(), torch.randn(3, 37, WIDTH)
    with torch.no_grad(), saccade.accelerate(module):
        module(x), module(x)
        shallow, up = copy.copy(module), copy.copy(module.up)
        assert not {"forward", "__reduce_ex__"} & (vars(shallow).keys() | vars(up).keys())
        up.weight = nn.Parameter(2 * up.weight)
        for part in ("up", "act"):
            for model in (module, shallow):
                agree(model(x), copy.deepcopy(model).double()(x.double()))
            setattr(shallow, part, {"up": up, "act": nn.ReLU()}[part])
        for model in (module, shallow):
            agree(model(x), copy.deepcopy(model).double()(x.double()))


def test_export_inside_the_block():
    module, x = FeedForward().eval(), torch.randn(3, WIDTH)
    with torch.no_grad(), saccade.accelerate(module):
        agree(module(x), copy.deepcopy(module).double()(x.double()))
        program = torch.export.export(module, (x,))
    assert not any("mkldnn" in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        agree(program.module()(x), module.double()(x.double()))
