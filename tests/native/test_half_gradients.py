"""Gradients in half precision where rows are short: what they may err by, derived, on every instruction set.

With u = eps / 2 of the dtype each result is rounded once: u |g|. Everything before is float32, but for one thing:
processors that multiply pairs of bfloat16 take the weights p and the slopes ds rounded to it, so a sum over them errs
by u sum |terms| more. Float32 itself errs by its own unit times the terms and the logits, whose error the exponential
passes on. The output's rounding is not among these: delta = sum_j p_ij dp_ij is not formed from it.
"""

from __future__ import annotations

import torch

import problems
import saccade
from looped import looped
from saccade.operator._backends.native._kernels import BF16_SETS

# B, Hq, Hkv, Lq, Lk, D, Dv; the first two are the sample inputs PyTorch tests its own function with.
SHAPES = [
    (4, 4, 4, 3, 6, 8, 8),
    (4, 1, 1, 3, 6, 8, 8),
    (2, 6, 3, 5, 7, 13, 3),
    (1, 2, 1, 9, 1, 3, 5),
    (3, 1, 1, 1, 9, 7, 7),
    (1, 2, 2, 49, 95, 5, 11),
    (1, 3, 1, 50, 96, 16, 17),
    (1, 1, 1, 7, 49, 129, 33),
]


def drawn(shape, dtype, spread):
    b, heads, kv_heads, rows, keys, width, value_width = shape
    draw = torch.Generator().manual_seed(17)

    def uniform(*sizes):  # in [-spread, spread], as PyTorch's make_tensor draws them for 9
        return ((torch.rand(*sizes, generator=draw) * 2 - 1) * spread).to(dtype)

    q, k = uniform(b, heads, rows, width), uniform(b, kv_heads, keys, width)
    return (
        q,
        k,
        uniform(b, kv_heads, keys, value_width),
        uniform(1, heads, rows, keys),
        uniform(b, heads, rows, value_width),
    )


def by_group(terms, kv_heads):
    """(B, Hq, ...) to (B, Hkv, ...), summed over the query heads of each key head."""
    return terms.unflatten(1, (kv_heads, -1)).sum(2)


def truth_and_bounds(q, k, v, bias, c, seen, dtype, pairs):
    """Gradients in float64 and what each entry may err by, of query, key, value and bias."""
    q, k, v, bias, c = (x.double() for x in (q, k, v, bias, c))
    kv_heads, scale = k.shape[1], q.shape[-1] ** -0.5
    k, v = (x.repeat_interleave(q.shape[1] // kv_heads, 1) for x in (k, v))
    s = (q @ k.mT * scale + bias).masked_fill(~seen, -torch.inf)
    p = torch.nan_to_num(torch.softmax(s, -1))
    dp = c @ v.mT
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    # Of float32: the sum of a logit's products and of dp's, with the exponential's own error.
    unit32 = 2.0**-24
    loose = unit32 * (64 + 4 * ((q.abs() @ k.mT.abs()) * scale + bias.abs()).amax())
    of_p = loose * p + 2.0**-126  # what would be subnormal is 0
    slack = of_p * (dp.abs() + delta.abs() + c.abs() @ v.abs().mT)
    u = torch.finfo(dtype).eps / 2
    slopes, weights = slack + (u * ds.abs() if pairs else 0), of_p + (u * p if pairs else 0)
    found = {
        "query": (ds @ k * scale, slopes @ k.abs() * scale),
        "key": (by_group(ds.mT @ q * scale, kv_heads), by_group(slopes.mT @ q.abs() * scale, kv_heads)),
        "value": (by_group(p.mT @ c, kv_heads), by_group(weights.mT @ c.abs(), kv_heads)),
        "bias": (ds.sum(0, keepdim=True), slack.sum(0, keepdim=True)),
    }
    least = u * torch.finfo(dtype).smallest_normal
    return {name: (g, u * g.abs() + more * (1 + u) + least) for name, (g, more) in found.items()}


@looped("spread", [1.0, 9.0])
@looped("causal", [False, True])
@looped("dtype", [torch.bfloat16, torch.float16])
def test_gradients_err_by_what_is_derived(dtype, causal, spread, instructions):
    pairs = instructions in BF16_SETS and dtype == torch.bfloat16
    for shape in SHAPES:
        *given, c = drawn(shape, dtype, spread)
        leaves = [x.clone().requires_grad_() for x in given]
        mask = saccade.Causal().at(0) if causal else None
        out = saccade.attention(*leaves[:3], mask, bias=leaves[3], backend="native")
        seen = torch.ones(out.shape[2], given[1].shape[2], dtype=torch.bool)
        bounds = truth_and_bounds(*given, c, seen.tril() if causal else seen, dtype, pairs)
        for (name, (want, bound)), got in zip(bounds.items(), torch.autograd.grad(out, leaves, c), strict=True):
            worst = ((got.double() - want).abs() / bound).max().item()
            assert worst <= 1, f"{name} of {shape}: {worst:.2f} times the bound"


@looped("dtype", [torch.bfloat16, torch.float16])
def test_every_way_to_a_logit_and_the_sinks_gradient(dtype, instructions):
    """Softcap, dropout, ALiBi, padding, a sink and a cotangent of the lse: as float64 has it, rounded once."""
    named = problems.tensors(2, 6, 3, 11, 13, 5, 7, dtype=dtype) | {"sink": torch.randn(6).to(dtype)}
    options = {"softcap": 3.0, "dropout": saccade.Dropout(0.3, seed=5)}
    mask = saccade.Causal() & saccade.Padding(torch.tensor([13, 7]))
    found = []
    for wide, backend in ((False, "native"), (True, "reference")):
        leaves = problems.leaves({name: t.double() if wide else t for name, t in named.items()})
        q, k, v, sink = leaves.values()
        slopes = torch.linspace(0.1, 1, 6).to(dtype).to(q.dtype)
        out, lse = saccade.attention_with_lse(
            q, k, v, mask, bias=saccade.ALiBi(slopes), sink=sink, backend=backend, **options
        )
        c_out = torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype).to(out.dtype)
        found.append(torch.autograd.grad([out, lse], list(leaves.values()), [c_out, torch.ones_like(lse) / 8]))
    unit = torch.finfo(dtype).eps * (4 if instructions in BF16_SETS and dtype == torch.bfloat16 else 1)
    for name, got, want in zip(named, *found, strict=True):
        assert ((got.double() - want).abs() <= unit * want.abs().clamp(min=0.25)).all(), name
