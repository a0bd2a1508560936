"""Random score functions and mask functions beside PyTorch's eager code: out, lse and gradients of everything."""

from __future__ import annotations

import math

import pytest
import torch
from flex_functions import qkv, table, theirs
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import saccade

HEADS, LENGTHS, ITEMS = (2, 1), (5, 7), 2  # Hq and Hkv, Lq and Lk, B

INTS = st.recursive(
    st.sampled_from(["b", "h", "q", "k", "2", "3", "ids[k]", "ids[q]"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
        st.tuples(inner, st.sampled_from(["// 2", "% 3", "// -3", "% -2"])).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda x: f"abs({x} - k)"),
    ),
    max_leaves=4,
)
TESTS = st.recursive(
    st.tuples(INTS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), INTS).map(
        lambda parts: f"(q - q + {parts[0]} {parts[1]} {parts[2]})"
    ),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("&|^"), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda x: f"(~{x})"),
    ),
    max_leaves=3,
)
UNARY = ["torch.tanh({})", "torch.sigmoid({})", "torch.sin({})", "torch.cos({})", "torch.exp(-{}.abs())", "(-{})"]
UNARY += ["torch.sqrt({}.abs() + 1)", "torch.log({}.abs() + 0.5)", "torch.clamp({}, -0.7, 1.3)", "{}.square()"]
BINARY = ["({} + {})", "({} - {})", "({} * {})", "({} / (1 + {}.abs()))", "torch.minimum({}, {})"]
BINARY += ["torch.maximum({}, {})"]
FLOATS = st.recursive(
    st.sampled_from(["score", "score", "bias[h]", "items[b, h]", "near[h, q - k + 7]", "by_key[b, k]"])
    | INTS.map(lambda x: f"(score * 0 + {x})"),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(UNARY), inner).map(lambda parts: parts[0].format(parts[1])),
        st.tuples(st.sampled_from(BINARY), inner, inner).map(lambda parts: parts[0].format(*parts[1:])),
        st.tuples(TESTS, inner, inner).map(lambda parts: f"torch.where({', '.join(parts)})"),
    ),
    max_leaves=6,
)
# Bounded: a difference in the last digit of a score of 1000 is one of 1e-4 in float32.
SCORES = st.one_of(
    FLOATS.map(lambda x: f"5 * torch.tanh({x} / 5)"),
    st.tuples(TESTS, FLOATS).map(lambda parts: f"torch.where({parts[0]}, 5 * torch.tanh({parts[1]} / 5), -torch.inf)"),
)


def captured(dtype):
    shapes = {"bias": HEADS[:1], "items": (ITEMS, HEADS[0]), "near": (HEADS[0], 16), "by_key": (ITEMS, LENGTHS[1])}
    made = {name: table(*shape, seed=seed).to(dtype) for seed, (name, shape) in enumerate(shapes.items())}
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def function_of(text, arguments, tensors):
    space = {"torch": torch, "ids": torch.tensor([0, 0, 1, 1, 1, 3, 3]), **tensors}
    exec(f"def function({arguments}):\n    return {text}", space)
    return space["function"]


def gradients(out, lse, tensors):
    loss = (out * table(*out.shape, seed=30).to(out.dtype)).sum() + lse[lse > -math.inf].sum()
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(tensors, found, strict=True)]


def compare(score, mask):
    exact = captured(torch.float64)
    wide = qkv(heads=HEADS, lengths=LENGTHS, batch=ITEMS)
    score_mod = function_of(score, "score, b, h, q, k", exact)
    mask_mod = None if mask is None else function_of(mask, "b, h, q, k", {})
    expected = theirs(*wide, score_mod, mask_mod)
    right = [*expected[:2], *map(torch.nan_to_num, gradients(*expected[:2], [*wide, *exact.values()]))]
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, ITEMS, HEADS[0], *LENGTHS, device="cpu", BLOCK_SIZE=3)
    for dtype, off in ((torch.float64, 1e-9), (torch.float32, 2e-4)):
        small = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in exact.items()}
        narrow = [tensor.detach().to(dtype).requires_grad_() for tensor in wide]
        out, aux = saccade.flex_attention(
            *narrow,
            function_of(score, "score, b, h, q, k", small),
            block_mask,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        found = [out, aux.lse, *gradients(out, aux.lse, [*narrow, *small.values()])]
        for mine, theirs_ in zip(found, right, strict=True):
            torch.testing.assert_close(mine.double(), theirs_, rtol=off, atol=off)


CASES = {"score": SCORES, "mask": st.none() | TESTS}


@given(**CASES)
@settings(max_examples=15)
def test_random_functions(score, mask):
    compare(score, mask)


@pytest.mark.slow
@given(**CASES)
@settings(max_examples=500, suppress_health_check=list(HealthCheck))
def test_many_random_functions(score, mask):
    compare(score, mask)
