"""Which head reads which, any strides, empty inputs."""

from __future__ import annotations

import math

import pytest
import torch

import oracle
import problems
import saccade
from looped import looped
from problems import NATIVE, assert_close


@looped(("heads", "kv_heads"), [(6, 3), (6, 2), (6, 1), (3, 3)])
def test_query_head_reads_its_own_kv_head(heads, kv_heads, backend):
    # Values name their head: head h must answer h // (Hq // Hkv) whatever the weights.
    named = problems.tensors(heads=heads, kv_heads=kv_heads)
    named["value"] = torch.arange(kv_heads).to(problems.DTYPE)[None, :, None, None].expand(2, -1, 13, 7)
    out = saccade.attention(*named.values(), backend=backend)
    want = torch.arange(heads).div(heads // kv_heads, rounding_mode="floor").double()
    assert_close(out, want[None, :, None, None].expand(2, heads, 11, 7))


def strided(tensor, layout):
    """The same numbers standing elsewhere; the last stride stays 1 unless the name says otherwise."""
    if layout == "(B, L, H, D)":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "(L, B, H, D)":
        return tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if layout == "inside a wider tensor":
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 17), math.nan, dtype=tensor.dtype)
        wide[..., 3 : 3 + tensor.shape[-1]] = tensor
        return wide[..., 3 : 3 + tensor.shape[-1]]
    if layout == "every other row":
        wide = torch.full((*tensor.shape[:2], 2 * tensor.shape[2], tensor.shape[3]), math.nan, dtype=tensor.dtype)
        wide[:, :, 1::2] = tensor
        return wide[:, :, 1::2]
    if layout == "last stride 2":
        return torch.stack([tensor, torch.full_like(tensor, math.nan)], -1)[..., 0]
    assert layout == "last axis first"
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


LAYOUTS = (
    "(B, L, H, D)",
    "(L, B, H, D)",
    "inside a wider tensor",
    "every other row",
    "last stride 2",
    "last axis first",
)


@looped("layout", LAYOUTS)
def test_any_strides(layout, backend):
    problem = problems.CASES["wide_causal"]()
    want = problem.truth()
    moved = {name: strided(tensor, layout) for name, tensor in problem.tensors.items()}
    out, lse = problem.ours(moved, backend)
    assert_close(out, want.out)
    assert_close(lse, want.lse)


@looped("layout", LAYOUTS)
def test_gradients_through_any_strides(layout, backend):
    problem = problems.CASES["wide_causal"]()
    ours, theirs = problems.leaves(problem.tensors), problems.leaves(problem.tensors)
    out = problem.out({name: strided(leaf, layout) for name, leaf in ours.items()}, backend)
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, list(ours.values()), cotangent)
    want = torch.autograd.grad(problem.truth(theirs).out, list(theirs.values()), cotangent)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


def test_expanded_tensors(backend):
    named = problems.tensors()
    named["key"] = named["key"][:, :1].expand(-1, 3, -1, -1)
    named["value"] = named["value"][:1].expand(2, -1, -1, -1)
    named["query"] = named["query"][:, :, :1].expand(-1, -1, 11, -1)
    assert_close(saccade.attention(*named.values(), backend=backend), oracle.attend(*named.values()).out)


def test_gradient_of_an_expanded_tensor_sums_over_it(backend):
    named = problems.tensors()
    ours, theirs = (problems.leaves(named | {"key": named["key"][:, :1]}) for _ in range(2))
    out = saccade.attention(ours["query"], ours["key"].expand(-1, 3, -1, -1), ours["value"], backend=backend)
    want = oracle.attend(theirs["query"], theirs["key"].expand(-1, 3, -1, -1), theirs["value"]).out
    cotangent = torch.randn(out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, list(ours.values()), cotangent)
    for one, other in zip(got, torch.autograd.grad(want, list(theirs.values()), cotangent), strict=True):
        assert_close(one, other)


@looped("stride", [0, 1, 997])
def test_strides_of_size_one_axes_mean_nothing(stride, backend):
    named = problems.tensors(batch=1, heads=1, kv_heads=1, rows=1, keys=13, width=1, value_width=1)
    want = oracle.attend(*named.values()).out
    storage = {name: torch.cat([t.flatten(), t.new_full((5000,), math.nan)]) for name, t in named.items()}
    shapes = {name: t.shape for name, t in named.items()}
    odd = {
        name: torch.as_strided(storage[name], shapes[name], [stride if n == 1 else 1 for n in shapes[name]])
        for name in named
    }
    for name in named:
        assert torch.equal(odd[name], named[name])
    assert_close(saccade.attention(*odd.values(), backend=backend), want)


@looped("zero", ["batch", "rows", "keys"])
@looped("masked", [False, True])
def test_empty_inputs_forward_and_backward(zero, masked, backend):
    problem = problems.Problem(problems.tensors(**{zero: 0}) | {"sink": torch.randn(6, dtype=problems.DTYPE)})
    problem.mask = saccade.Causal() if masked else None
    ours = problems.leaves(problem.tensors)
    out, lse = problem.ours(ours, backend)
    b, h, r, _ = problem.shape
    assert out.shape == (b, h, r, 7) and lse.shape == (b, h, r)
    assert (out == 0).all()
    assert torch.equal(lse, ours["sink"][None, :, None].expand(b, h, r))
    found = dict(zip(ours, torch.autograd.grad(out.sum() + lse.sum(), list(ours.values())), strict=True))
    assert torch.equal(found.pop("sink"), torch.full((6,), float(b * r), dtype=problems.DTYPE))
    for name, gradient in found.items():
        assert gradient.shape == ours[name].shape and (gradient == 0).all()


@looped("zero", ["batch", "rows", "keys"])
@looped("kind", ["tensor", "alibi", "relative"])
def test_empty_inputs_with_a_bias(zero, kind, exact):
    named = problems.tensors(**{zero: 0})
    b, r, k = named["query"].shape[0], named["query"].shape[2], named["key"].shape[2]
    parameter = {"tensor": (r, k), "alibi": (6,), "relative": (8, 6)}[kind]
    parameter = torch.randn(parameter, dtype=problems.DTYPE, requires_grad=True)
    bias = {"tensor": lambda p: p, "alibi": saccade.ALiBi, "relative": saccade.RelativeBias}[kind](parameter)
    out, lse = saccade.attention_with_lse(*problems.leaves(named).values(), bias=bias, backend=exact)
    assert out.shape == (b, 6, r, 7) and (out == 0).all() and (lse == -math.inf).all()
    (gradient,) = torch.autograd.grad(out.sum() + torch.where(lse.isfinite(), lse, 0.0).sum(), [parameter])
    assert gradient.shape == parameter.shape and (gradient == 0).all()


@pytest.mark.slow
@looped(("rows", "keys"), [(3, 0), (0, 3), (0, 0)])
@looped("kv_heads", [4, 2, 1])
@looped("backend", ["auto", "reference", "chunked", "sdpa", NATIVE])
def test_empty_inputs_with_masks_and_biases_of_every_shape(rows, keys, kv_heads, backend):
    dtype = torch.float32 if backend == "native" else torch.float64
    named = problems.tensors(2, 4, kv_heads, rows, keys, 16, 16, dtype=dtype)
    shapes = [(rows, keys), (1, 1, 1, 1), (2, 4, rows, keys), (1, 4, rows, 1), (1, 4, 1, keys), (2, 1, 1, 1)]
    masks = [saccade.Padding(torch.tensor([keys, keys])), *(torch.ones(s, dtype=torch.bool) for s in shapes)]
    if backend != "sdpa":
        masks.append(saccade.Causal())
    biases = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for mask, bias in [*((m, None) for m in masks), *((None, b) for b in biases), (masks[3], biases[3])]:
        # `auto` gives a bias to F.sdpa where it needs no gradient.
        for of_bias in (False, True):
            leaves = list(problems.leaves(named).values())
            if bias is not None:
                leaves.append(bias.clone().requires_grad_(of_bias))
            out = saccade.attention(*leaves[:3], mask, bias=None if bias is None else leaves[3], backend=backend)
            assert out.shape == (2, 4, rows, 16) and (out == 0).all()
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            for leaf, gradient in zip(asked, torch.autograd.grad(out.sum(), asked), strict=True):
                assert gradient.shape == leaf.shape and (gradient == 0).all()


def test_no_keys_without_sink_gives_zero_and_minus_infinity(backend):
    named = problems.tensors(keys=0)
    out, lse = saccade.attention_with_lse(*named.values(), backend=backend)
    assert out.shape == (2, 6, 11, 7) and (out == 0).all() and (lse == -math.inf).all()
    assert (saccade.attention(*named.values(), backend=backend) == 0).all()


def test_inputs_are_not_written_to(backend):
    problem = problems.CASES["everything"]()
    ours = problems.leaves(problem.tensors)
    before = {name: leaf.detach().clone() for name, leaf in ours.items()}
    out = problem.out(ours, backend)
    kept = out.detach().clone()
    cotangent = torch.randn_like(out)
    same = cotangent.clone()
    torch.autograd.grad(out, list(ours.values()), cotangent)
    assert all(torch.equal(leaf.detach(), before[name]) for name, leaf in ours.items())
    assert torch.equal(out.detach(), kept) and torch.equal(cotangent, same)
