"""What a joined, packed or fused product must share with the plain one: layout, special numbers, the latest weights."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import saccade

E = 192  # wide enough for a packed copy
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def plain_inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Projections(nn.Module):
    """Read one tensor, so that their product is one."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(E, E) for _ in range(3))

    def forward(self, x):
        return self.query(x), self.key(x), self.value(x)


class Activated(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.dense, self.activation = nn.Linear(E, E), activation

    def forward(self, x):
        return self.activation(self.dense(x))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(E, E), nn.LayerNorm(E)

    def forward(self, x, y):
        return self.norm(self.dense(x) + y)


@pytest.mark.parametrize("rows", [(5, 1), (2, 7), (1, 307)])
def test_joined_projections_have_the_layout_of_the_plain_ones(rows):
    """Of a step of decoding, `view(B * H, 1, D)` works for contiguous memory alone."""
    model, x = Projections(), torch.randn(*rows, E)
    plain = model(x)
    with saccade.accelerate(model):
        for _ in range(4):
            for out, expected in zip(model(x), plain, strict=True):
                torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
                assert out.stride() == expected.stride()
                assert out.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


@pytest.mark.parametrize(
    "edit", [lambda k: k.weight.zero_(), lambda k: k.weight.data.neg_(), lambda k: k.bias.data.add_(1)]
)
def test_a_part_that_is_ready_is_of_the_weights_at_its_layers_call(edit):
    model, x = Projections(), torch.randn(2, 7, E)
    with saccade.accelerate(model):
        for _ in range(3):
            model(x)
        model.query(x)
        edit(model.key)
        expected = nn.functional.linear(x, model.key.weight, model.key.bias)
        torch.testing.assert_close(model.key(x), expected, rtol=1e-5, atol=1e-5)


def test_hooks_that_stream_weights_in_and_out():
    model, x = Projections(), torch.randn(2, 7, E)
    plain, stored, places = model(x), model.key.weight.data.clone(), torch.empty(E, E)

    def load(module, args):
        places.copy_(stored)
        module.weight.data = places

    def free(module, args, out):
        places.zero_()

    model.key.register_forward_pre_hook(load)
    model.key.register_forward_hook(free)
    with saccade.accelerate(model):
        for _ in range(5):
            torch.testing.assert_close(model(x)[1], plain[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.GELU, lambda: nn.GELU("tanh")])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_nan_and_infinity_pass_through_activations(activation, rows, special):
    """oneDNN's ReLU of NaN is 0, and the unit matrix by which one row is activated makes NaN of infinity."""
    model, x = Activated(activation()), torch.randn(2, rows, E)
    x[0, 0, 3] = special
    expected = model(x)
    with saccade.accelerate(model) as run:
        model(torch.randn(2, 8, E))
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert "taken" in run.explain()


@pytest.mark.parametrize("bias", [torch.randn(2 * E)[::2], torch.ones(1).expand(E), torch.ones(1)])
@pytest.mark.parametrize("options", [{}, {"weights": "bfloat16"}, {"keep_weights": False}])
@pytest.mark.parametrize("rows", [1, 23])
def test_a_bias_of_any_layout(bias, options, rows):
    """One that is read as if it lay in E numbers side by side reads other memory."""
    model, x = nn.Sequential(nn.Linear(E, E)), torch.randn(rows, E)
    model[0].bias = nn.Parameter(bias.clone() if bias.stride() == (1,) else bias)
    expected = model(x)
    bound = 2**-7 * float(expected.abs().max()) if "weights" in options else 1e-5
    with saccade.accelerate(model, **options):
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=bound)


def test_a_residual_of_another_dtype_is_promoted():
    model, x = Residual(), torch.randn(2, 7, E)
    with saccade.accelerate(model):
        model(x, x)
        expected = model.norm(nn.functional.linear(x, model.dense.weight, model.dense.bias) + x.bfloat16())
        torch.testing.assert_close(model(x, x.bfloat16()), expected, rtol=1e-5, atol=1e-5)


def test_a_write_while_other_threads_run_raises_nothing():
    model, x, raised, over = Projections(), torch.randn(2, 29, E), [], threading.Event()

    def run():
        with torch.no_grad():
            while not over.is_set():
                try:
                    model(x)
                except Exception as error:
                    raised.append(error)

    with saccade.accelerate(model):
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(300):
            model.key.weight.neg_()
        over.set()
        for thread in threads:
            thread.join()
    assert not raised


CONVERSIONS = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "float64": lambda model: model.double(),
    "shared": lambda model: model.share_memory(),
    "pruned": lambda model: prune.l1_unstructured(model[0], "weight", 0.2),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_dropped_weights_that_are_converted_come_back(name):
    model = nn.Sequential(nn.Linear(E, E))
    weight = model[0].weight.detach().clone()
    with saccade.accelerate(model, keep_weights=False):
        model(torch.randn(3, E))
        CONVERSIONS[name](model)
    now = model[0].weight_orig if name == "pruned" else model[0].weight
    assert torch.equal(now, weight.to(now.dtype))


def test_dropped_weights_are_not_copied_and_shared_ones_not_dropped():
    model = nn.Sequential(nn.Linear(E, E)).share_memory()
    with saccade.accelerate(model, keep_weights=False):
        model(torch.randn(3, E))
        assert not model[0].weight.isnan().any()
    assert model[0].weight.is_shared()
    model = nn.Sequential(nn.Linear(E, E))
    with saccade.accelerate(model, keep_weights=False):
        model(torch.randn(3, E))
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match=r"keep_weights=False"):
                make(model)
