"""Sigmoid attention by the native kernels, on every instruction set, against its formula in float64.

What holds for tiles as well is tested in variants/test_sigmoid.py.

Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths.
"""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from looped import looped
from native.fuzzing import DTYPES, each_set
from saccade.variants import sigmoid_attention

ROWS, KEYS, GROUP = 127, 113, 3
ROW, KEY = torch.arange(ROWS)[:, None], torch.arange(KEYS)
PLACED = ROW + KEYS - ROWS  # where a row stands among the keys
LENGTHS = torch.tensor([101, 37])[:, None, None, None]
BITS = torch.rand(2, 6, ROWS, KEYS, generator=torch.Generator().manual_seed(3)) < 0.6
MASKS = {
    "none": (None, torch.ones(ROWS, KEYS, dtype=torch.bool)),
    "causal": (saccade.Causal(), PLACED >= KEY),
    "window": (saccade.Window(13, 5), (PLACED - KEY <= 13) & (KEY - PLACED <= 5)),
    "padding": (saccade.Padding([101, 37], queries=[101, 37]), (LENGTHS > ROW) & (LENGTHS > KEY)),
    "remainders": (saccade.Causal() & ~saccade.Columns(7, 2), (PLACED >= KEY) & (KEY % 7 < 5)),
    "booleans": (BITS, BITS),
}
every_mask, every_dtype = looped("mask", MASKS), looped("dtype", DTYPES)


def tensors(dtype):
    torch.manual_seed(7)
    shapes = {"query": (2, 6, ROWS, 31), "key": (2, 6 // GROUP, KEYS, 31), "value": (2, 6 // GROUP, KEYS, 29)}
    return [(2 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes.values()]


def formula(query, key, value, see, bias=0.0):
    """All weights, and sums in the dtype of the inputs. A bias of -inf hides."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    see = see & (torch.as_tensor(bias) > -math.inf)
    n = see.sum(-1, keepdim=True).clamp(min=1).double()
    logits = torch.where(see, query @ key.mT * query.shape[3] ** -0.5 + bias, 0.0)
    return torch.where(see, torch.sigmoid(logits - n.log().to(logits.dtype)), 0.0).to(value.dtype) @ value


def everything(function, leaves):
    """out and the gradients of the leaves."""
    out = function(*leaves)
    torch.manual_seed(11)
    return out, *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out.dtype))


def assert_as_good(got, plain, want):
    """At most twice plain PyTorch's error in the same dtype, or a random walk of the longest sum's roundings."""
    for ours, theirs, truth in zip(got, plain, want, strict=True):
        floor = (GROUP * ROWS) ** 0.5 * torch.finfo(ours.dtype).eps / 2 * truth.abs().max()
        error, allowed = (ours.double() - truth).abs().max(), 2 * (theirs.double() - truth).abs().max()
        assert error <= max(floor, allowed), (error, allowed, floor)


@every_mask
@every_dtype
def test_output_and_gradients(mask, dtype):
    mask, see = MASKS[mask]
    leaves = tensors(dtype)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = everything(lambda *qkv: formula(*qkv, see), doubles)
    plain = everything(lambda *qkv: formula(*qkv, see), leaves)
    for _ in each_set():
        assert_as_good(everything(lambda *qkv: sigmoid_attention(*qkv, mask), leaves), plain, want)


@every_mask
def test_a_bias_and_its_gradient(mask):
    """A tensor of scores, one for all items and heads, with -inf in it: its keys do not count."""
    mask, see = MASKS[mask]
    torch.manual_seed(5)
    bias = torch.where(torch.rand(ROWS, KEYS) < 0.2, -math.inf, torch.randn(ROWS, KEYS))
    leaves = [*tensors(torch.float32), bias.requires_grad_()]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want, plain = (everything(lambda q, k, v, b: formula(q, k, v, see, b), given) for given in (doubles, leaves))
    for _ in each_set():
        got = everything(lambda q, k, v, b: sigmoid_attention(q, k, v, mask, bias=b), leaves)
        assert_as_good(got, plain, want)


@pytest.mark.parametrize("rows", [1, 5], ids=["streamed", "packed"])
@every_dtype
def test_one_query_and_few(rows, dtype):
    """Three heads that share keys: 3 rows stream their keys, 15 pack them."""
    query, key, value = (leaf.detach() for leaf in tensors(dtype))
    query = query[:, :, -rows:]
    see = PLACED[-rows:] >= KEY
    want = formula(query.double(), key.double(), value.double(), see)
    plain = formula(query, key, value, see)
    for _ in each_set():
        assert_as_good([sigmoid_attention(query, key, value, saccade.Causal())], [plain], [want])


@looped("length", [1, 7, 16381])
def test_logits_from_minus_1e4_to_1e4(length):
    """One key, so that the output is one weight: within 4 units of it and the roundings of s log2(e) and of log2(e)."""
    logits = torch.cat([torch.linspace(-1e4, 1e4, 4001), torch.linspace(-120, 120, 24001)])
    query, ones = logits[None, None, :, None].contiguous(), torch.ones(1, 1, 1, 1)
    exact = logits.double()
    want = torch.sigmoid(exact - math.log(length))
    eps = torch.finfo(torch.float32).eps
    for _ in each_set():
        got = sigmoid_attention(query, ones, ones, scale=1.0, length=length)[0, 0, :, 0].double()
        # Below the least normal number weights are 0. 2^-125: the bound of n is a power of two.
        allowed = (4 * eps + (eps / 2 + eps / 8) * exact.abs()) * want + 2.0**-125
        assert ((got - want).abs() <= allowed).all(), ((got - want).abs() / allowed).max()
        assert (got[exact > 40] == 1).all()


def test_threads_change_no_bit():
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(everything(lambda *qkv: sigmoid_attention(*qkv, saccade.Causal()), tensors(torch.float32)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for run in found[1:] for one, other in zip(run, found[0], strict=True))
