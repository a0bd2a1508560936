"""Norms of gradients of q, k, v and out by head, against those that autograd gives by itself."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import saccade
from saccade.monitoring._gradients import norms as measured_norms

B, L, H, D = 3, 7, 4, 5


def norms(gradient):
    return gradient.square().sum((0, 2, 3)).sqrt()


class Projections(nn.Module):
    """q, k, v (B, heads, L, D) from x, into a function; the last q, k, v and out are at hand."""

    def __init__(self, function, kv_heads=H):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H * D, heads * D) for heads in (H, kv_heads, kv_heads))
        self.function = function

    def forward(self, x):
        self.tensors = [layer(x).unflatten(-1, (-1, D)).transpose(1, 2) for layer in self.layers]
        self.tensors.append(self.function(*self.tensors))
        return self.tensors[-1].transpose(1, 2).flatten(2)


def by_hand(q, k, v):
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


FUNCTIONS = {
    "F.sdpa": (F.scaled_dot_product_attention, H),
    "F.sdpa, groups": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), 2),
    "saccade.attention": (saccade.attention, H),
    "saccade.attention, groups": (saccade.attention, 2),
    "by hand": (by_hand, H),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_norms_by_head(name):
    function, kv_heads = FUNCTIONS[name]
    model, x, told = Projections(function, kv_heads), torch.randn(B, L, H * D), []
    with saccade.watch(model, gradients=True, on_gradients=told.append) as seen:
        loss = model(x).pow(3).sum()
        expected = torch.autograd.grad(loss, model.tensors, retain_graph=True)
        model(x).pow(3).sum().backward()
    assert len(told) == 2  # `autograd.grad` is a backward pass, too
    for record in told:
        assert (record.name, record.path, record.layer, record.order) == ("", "", 0, 1)
        for gradient, what in zip(expected, ("query", "key", "value", "out"), strict=True):
            torch.testing.assert_close(record.gradients[what], norms(gradient))
    assert [record.step for record in told] == [0, 1]
    for head, statistics in seen.aggregates[""].items():
        for gradient, what in zip(expected, ("query", "key", "value", "out"), strict=True):
            norm = norms(gradient)[head // (H // gradient.shape[1])]
            assert statistics[f"{what}.gradient"].mean == pytest.approx(float(norm), rel=1e-5)
            assert statistics[f"{what}.gradient"].count == 2


REAL = torch.arange(L) < torch.tensor([L, 3, 5])[:, None]
PADDED = {
    "F.sdpa": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, REAL[:, None, None]), H),
    "F.sdpa, groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, REAL[:, None, None], enable_gqa=True),
        2,
    ),
    "saccade.attention": (lambda q, k, v: saccade.attention(q, k, v, saccade.Padding(REAL, REAL)), H),
    "by hand": (lambda q, k, v: (q @ k.mT).masked_fill(~REAL[:, None, None], -1e9).softmax(-1) @ v, H),
}


@pytest.mark.parametrize("name", PADDED)
def test_padded_positions_that_the_loss_reads_do_not_count(name):
    function, kv_heads = PADDED[name]
    model, x, told = Projections(function, kv_heads), torch.randn(B, L, H * D), []
    much = torch.where(REAL, 1.0, 1e4)[..., None]
    with saccade.watch(model, gradients=True, on_gradients=told.append):
        loss = ((model(x) + 1) * much).pow(3).sum()
        expected = torch.autograd.grad(loss, model.tensors)
    assert expected[3][~REAL[:, None].expand(B, H, L)].abs().max() > 1e3
    (record,) = told
    for gradient, what in zip(expected, ("query", "key", "value", "out"), strict=True):
        torch.testing.assert_close(record.gradients[what], norms(gradient * REAL[:, None, :, None]))


def test_a_tensor_that_items_share_has_the_rows_that_are_real_in_one_of_them():
    real = torch.arange(L) < torch.tensor([4, 3, 5])[:, None]

    gradient = torch.randn(1, H, L, D)
    some = (torch.arange(L) < 5)[:, None]
    assert not torch.allclose(norms(gradient), norms(gradient * some), rtol=0.1)
    torch.testing.assert_close(measured_norms(gradient, real[:, None]), norms(gradient * some))


def test_learned_queries_that_items_share_are_no_padding_of_theirs():
    real = torch.arange(L) < torch.tensor([4, 3, 5])[:, None]

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, H, L, D))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.query, x, x, real[:, None, None])

    model, x, told = Shared(), torch.randn(B, H, L, D), []
    with saccade.watch(model, gradients=True, on_gradients=told.append):
        model(x).pow(3).sum().backward()
    torch.testing.assert_close(told[0].gradients["query"], norms(model.query.grad))


def test_a_gradient_that_cannot_be_measured_is_counted_and_the_pass_goes_on(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    model, x = Projections(F.scaled_dot_product_attention), torch.randn(B, L, H * D)
    with saccade.watch(model, gradients=True) as seen:
        monkeypatch.setattr("saccade.monitoring._gradients.norms", broken)
        model(x).sum().backward()
    assert model.layers[0].weight.grad is not None
    assert seen.unobserved[": gradient of query"].reason == "RuntimeError: broken"


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    layer, x, told = nn.MultiheadAttention(H * D, H, batch_first=True), torch.randn(B, L, H * D), []
    with saccade.watch(layer, gradients=True, on_gradients=told.append):
        out, _ = layer(x, x, x, need_weights=need_weights)
        out.pow(3).sum().backward()
    weight = layer.in_proj_weight.grad.clone()

    def heads(part):
        return part.unflatten(-1, (H, D)).transpose(1, 2)

    parts = [heads(part) for part in F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)]
    parts[0] = parts[0] * D**-0.5 if need_weights else parts[0]  # nn.MultiheadAttention scales its queries first
    attended = F.scaled_dot_product_attention(*parts, scale=1.0 if need_weights else None)
    loss = F.linear(attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias).pow(3).sum()
    expected = torch.autograd.grad(loss, [*parts, attended])
    (record,) = told
    for gradient, what in zip(expected, ("query", "key", "value", "out"), strict=True):
        torch.testing.assert_close(record.gradients[what], norms(gradient), rtol=1e-4, atol=1e-6)
    assert torch.equal(weight, layer.in_proj_weight.grad)


def test_gradients_do_not_change_and_come_after_the_block_too():
    torch.manual_seed(0)
    model, x = Projections(F.scaled_dot_product_attention), torch.randn(B, L, H * D)
    model(x).pow(3).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with saccade.watch(model, gradients=True) as seen:
        out = model(x)
    assert "query.gradient" not in seen.aggregates[""][0]
    out.pow(3).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(expected, model.parameters(), strict=True))
    assert seen.aggregates[""][0]["query.gradient"].count == 1


def test_nothing_is_kept_alive():
    model, x = Projections(F.scaled_dot_product_attention), torch.randn(B, L, H * D)
    with saccade.watch(model, gradients=True):
        out = model(x)
        tensors = [weakref.ref(tensor) for tensor in model.tensors]
        out.sum().backward()
        del out
        model.tensors = None
        assert all(tensor() is None for tensor in tensors)


def test_by_hand_nothing_is_kept_alive_either():
    model, x = Projections(by_hand), torch.randn(B, L, H * D)
    with saccade.watch(model, gradients=True):
        out = model(x)
        tensors = [weakref.ref(tensor) for tensor in model.tensors]
        out.sum().backward()
        del out
        model.tensors = None
        assert all(tensor() is None for tensor in tensors)


def test_leaves_have_no_hooks_left():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Parameter(torch.randn(B, H, L, D))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.query, x, x)

    model, x = Leaves(), torch.randn(B, H, L, D)
    with saccade.watch(model, gradients=True) as seen:
        for _ in range(2):
            model(x).sum().backward()
    assert not model.query._backward_hooks
    assert set(seen.aggregates[""][0]) >= {"query.gradient", "out.gradient"}
    assert "key.gradient" not in seen.aggregates[""][0]
    assert seen.aggregates[""][0]["query.gradient"].count == 2


def test_one_backward_over_several_steps_and_several_over_one():
    model, x, told = Projections(F.scaled_dot_product_attention), torch.randn(B, L, H * D), []
    with saccade.watch(model, gradients=True, on_gradients=told.append):
        loss = model(x).sum() + model(x).sum()
        loss.backward(retain_graph=True)
        assert [record.step for record in told] == [0, 1]
        loss.backward()
    assert [record.step for record in told] == [0, 1, 0, 1]


def test_a_backward_that_fails_is_dropped():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Failing.fails:
                raise LookupError("in backward")
            return gradient

    model, x, told = (
        Projections(lambda q, k, v: saccade.attention(Failing.apply(q), k, v)),
        torch.randn(B, L, H * D),
        [],
    )
    with saccade.watch(model, gradients=True, on_gradients=told.append):
        Failing.fails = True
        with pytest.raises(LookupError):
            model(x).sum().backward()
        Failing.fails = False
        model(x).sum().backward()
    assert [record.step for record in told] == [1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions(reentrant):
    """Not reentrant: the first forward's graph is there. Reentrant: it has none, and that is said."""
    inner = Projections(F.scaled_dot_product_attention)

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x, told = Region(), torch.randn(B, L, H * D, requires_grad=True), []
    expected = torch.autograd.grad(inner(x).pow(3).sum(), inner.tensors)
    with saccade.watch(model, gradients=True, on_gradients=told.append) as seen:
        model(x).pow(3).sum().backward()
    assert seen.aggregates["inner"][0]["logits.max"].count == 1
    if reentrant:
        assert not told
        assert "reentrant checkpoint" in seen.unobserved["inner: gradients"].reason
    else:
        (record,) = told
        for gradient, what in zip(expected, ("query", "key", "value", "out"), strict=True):
            torch.testing.assert_close(record.gradients[what], norms(gradient))


def test_without_a_graph_it_is_said():
    model, x = Projections(F.scaled_dot_product_attention), torch.randn(B, L, H * D)
    with torch.no_grad(), saccade.watch(model, gradients=True) as seen:
        model(x)
    assert "no graph" in seen.unobserved[": gradients"].reason
