"""Linformer against its formula, and what random projections promise against closed forms.

B batch, Hq/Hkv query/kv heads, Lq/Lk lengths, N the greatest length, D key width, Dv value width.
"""

from __future__ import annotations

import math

import pytest
import torch

import problems
import saccade
from looped import looped
from problems import assert_close
from recording import Largest
from saccade.nn import AttentionConfig, BlockConfig, Encoder
from saccade.variants import HeadSizes, LinformerConfig, linformer_attention

RANK, LENGTH = 5, 17


def dense(query, key, value, E, F, *, scale=None):
    """The formula with whole matrices, in float64, one head at a time."""
    query, key, value, E, F = (x.double() for x in (query, key, value, E, F))
    heads, kv_heads, length = query.shape[1], key.shape[1], key.shape[2]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    out = []
    for h in range(heads):
        g = h // (heads // kv_heads)
        e, f = (x[g if x.shape[0] > 1 else 0, :, :length] for x in (E, F))
        weights = torch.softmax(scale * query[:, h] @ (e @ key[:, g]).mT, -1)
        out.append(weights @ (f @ value[:, g]))
    return torch.stack(out, 1)


def projections(heads=3, *, of_value=None, dtype=torch.float64):
    draw = torch.Generator().manual_seed(7)
    shapes = [(heads, RANK, LENGTH), (heads if of_value is None else of_value, RANK, LENGTH)]
    return [(torch.randn(s, generator=draw, dtype=torch.float64) / RANK**0.5).to(dtype) for s in shapes]


def call(t, E, F, mask=None, **options):
    return linformer_attention(t["query"], t["key"], t["value"], mask, key_projection=E, value_projection=F, **options)


# --- the formula ------------------------------------------------------------------------------------------------------


@looped("dtype", [torch.float64, torch.float32])
@looped("scale", [None, 0.37])
@looped("heads", [(3, None), (1, None), (3, 1)])
def test_the_formula_and_its_gradients(heads, scale, dtype):
    t = problems.tensors(dtype=dtype)
    E, F = projections(heads[0], of_value=heads[1], dtype=dtype)
    mine, theirs = (problems.leaves(t | {"E": E, "F": F}) for _ in range(2))
    out = call(mine, mine["E"], mine["F"], scale=scale)
    want = dense(*theirs.values(), scale=scale)
    assert out.dtype == dtype
    assert_close(out, want)
    cotangent = torch.randn(want.shape, dtype=torch.float64)
    for got, expected in zip(
        torch.autograd.grad(out, list(mine.values()), cotangent.to(dtype)),
        torch.autograd.grad(want, list(theirs.values()), cotangent),
        strict=True,
    ):
        assert_close(got, expected, terms=512)


def test_one_projection_for_keys_and_values():
    t, (E, _) = problems.tensors(), projections()
    leaves = problems.leaves({"E": E})
    out = call(t, leaves["E"], None)
    assert_close(out, dense(*t.values(), E, E))
    (both,) = torch.autograd.grad(out.sum(), leaves["E"])
    parts = [E.clone().requires_grad_() for _ in range(2)]
    assert_close(both, sum(torch.autograd.grad(dense(*t.values(), *parts).sum(), parts)))


def test_the_identity_is_exact_attention_to_the_bit():
    t = problems.tensors()
    one = torch.eye(13, dtype=torch.float64)[None]
    assert torch.equal(call(t, one, None), saccade.attention(*t.values()))
    wider = torch.eye(13, 17, dtype=torch.float64)[None]
    assert torch.equal(call(t, wider, None), saccade.attention(*t.values()))


def test_options_are_those_of_the_operator_over_projected_keys():
    t, (E, F) = problems.tensors(), projections()
    key, value = E[..., :13] @ t["key"], F[..., :13] @ t["value"]
    options = dict(scale=0.7, softcap=1.3, sink=torch.randn(6, dtype=torch.float64), dropout=saccade.Dropout(0.3, 5))
    got = call(t, E, F, **options)
    assert_close(got, saccade.attention(t["query"], key, value, **options))
    for name in options:
        assert not torch.allclose(got, call(t, E, F, **{k: v for k, v in options.items() if k != name}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Projections are summed in float32; projected keys and values are rounded as any keys and values are."""
    t, (E, F) = problems.tensors(dtype=dtype), projections(dtype=torch.float32)
    out = call(t, E, F)
    assert out.dtype == dtype
    want = dense(*t.values(), E, F)
    # Rounding of keys, values and output: three relative errors of eps / 2 on logits and values of size at most 8.
    torch.testing.assert_close(out.double(), want, rtol=0.0, atol=3 * 8 * torch.finfo(dtype).eps)


def test_autocast():
    t, (E, F) = problems.tensors(dtype=torch.float32), projections(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(t, E, F)
    assert torch.equal(out, call({n: x.bfloat16() for n, x in t.items()}, E, F))


# --- what random projections promise ----------------------------------------------------------------------------------


def exponent(ranks, errors, spread):
    """The slope of log error against log rank by least squares, and its standard error from those of the errors."""
    x = torch.tensor(ranks, dtype=torch.float64).log()
    x = x - x.mean()
    slope = (x * errors.log()).sum() / (x * x).sum()
    return slope.item(), ((x * spread / errors).square().sum().sqrt() / (x * x).sum()).item()


def errors_of(draws):
    """Root mean squares over draws (n, ...) of what was averaged over the rest, and their standard errors."""
    squares = draws.square().flatten(1).mean(1)
    mean = squares.mean()
    return mean.sqrt(), squares.std() / squares.shape[0] ** 0.5 / (2 * mean.sqrt())


@pytest.mark.slow
def test_random_keys_approach_exact_attention_as_rank_to_the_minus_half():
    """Rows of E = F that pick keys at random: importance sampling of softmax, its error known.

    Asymptotically the mean square is n / rank sum_j p_j^2 |v_j - out|^2 (the delta method).
    """
    n, draws, ranks = 257, 400, [64, 128, 256]
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, 1, rows, 4, dtype=torch.float64) for rows in (3, n, n))
    exact = saccade.attention(query, key, value)
    p = torch.softmax(query @ key.mT / 2, -1)
    spread = n * (p.square()[..., None] * (value[:, :, None] - exact[..., None, :]).square()).sum(3)
    found = []
    for rank in ranks:
        picked = torch.nn.functional.one_hot(torch.randint(n, (draws, rank)), n).double()
        # The draws stand in the heads: one projection for each.
        out = linformer_attention(*(x.expand(1, draws, -1, -1) for x in (query, key, value)), key_projection=picked)
        found.append(errors_of((out - exact)[0]))
        predicted = (spread.mean() / rank).sqrt()
        # What the delta method leaves out is of relative order 1 / rank, times the spread of the weights n p.
        assert abs(found[-1][0] - predicted) < 5 * found[-1][1] + 4 / rank * predicted
    slope, error = exponent(ranks, *map(torch.stack, zip(*found, strict=True)))
    assert error < 0.05
    assert abs(slope + 0.5) < 5 * error


@pytest.mark.slow
def test_normal_projections_keep_inner_products_along_the_sequence():
    """(x E^T)(F v) of E = F = R goes to x v, with the mean square (|x|^2 |v|^2 + (x v)^2) / rank exactly.

    Read from the mechanism: for small scale s, out = mean(R v) + s (x R^T R v / rank - mean(x R^T) mean(R v)) + O(s^2)
    with x = q k^T, so the odd part in s is x R^T R v / rank, less a term of means that is known.
    """
    n, draws, ranks, s = 53, 4000, [8, 16, 32], 1e-4
    torch.manual_seed(5)
    query, key, value = (torch.randn(1, 1, rows, 3, dtype=torch.float64) for rows in (1, n, n))
    x = query @ key.mT
    exact = (x @ value)[0, 0]
    mean_square = (x.square().sum(-1, keepdim=True) * value.square().sum(2, keepdim=True))[0, 0] + exact.square()
    found = []
    for rank in ranks:
        config = LinformerConfig(n, rank, "key-value")
        module = config.build(HeadSizes(3, draws, draws, 3, 3))
        R = torch.empty(draws, rank, n, dtype=torch.float64)
        module.key_projection = torch.nn.Parameter(R)
        module.reset_parameters()
        given = [t.expand(1, draws, -1, -1) for t in (query, key, value)]
        with torch.no_grad():
            odd = (module(*given, scale=s) - module(*given, scale=-s))[0] / (2 * s)
        means = (R @ x[0].mT).mean(1, keepdim=True) * (R @ value[0]).mean(1, keepdim=True)
        error = (odd + means) * rank - exact
        found.append(errors_of(error))
        squares = error.square().mean(0)
        bound = 5 * error.square().std(0) / draws**0.5
        assert ((squares - mean_square / rank).abs() < bound).all()
    slope, error = exponent(ranks, *map(torch.stack, zip(*found, strict=True)))
    assert error < 0.04
    assert abs(slope + 0.5) < 5 * error


def test_how_projections_begin():
    module = LinformerConfig(997, 61).build(HeadSizes(24, 6, 3, 4, 4))
    assert module.key_projection.shape == module.value_projection.shape == (3, 61, 997)
    for matrix in module.parameters():
        count = matrix.numel()
        assert abs(matrix.mean()) < 5 * (1 / 61 / count) ** 0.5
        assert abs(matrix.var() * 61 - 1) < 5 * (2 / count) ** 0.5
    assert not torch.equal(module.key_projection, module.value_projection)


@pytest.mark.parametrize(("shared", "count", "heads"), [("none", 2, 3), ("heads", 2, 1), ("key-value", 1, 1)])
def test_what_is_shared(shared, count, heads):
    module = LinformerConfig(LENGTH, RANK, shared).build(HeadSizes(30, 6, 3, 5, 7)).double()
    matrices = list(module.parameters())
    assert [tuple(m.shape) for m in matrices] == [(heads, RANK, LENGTH)] * count
    t = problems.tensors()
    assert_close(module(*t.values()), dense(*t.values(), matrices[0], matrices[-1]))


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@looped("bad", [0.0, math.nan, math.inf])
@looped("heads", [1, 3])
@looped("places", [[0, 1, 2, 3], [9, 10, 11, 12], [1, 4, 5, 11]])
def test_a_padded_item_gives_what_it_gives_alone(places, heads, bad):
    t, (E, F) = problems.tensors(), projections(heads)
    kept = torch.ones(2, 13, dtype=torch.bool)
    kept[1] = False
    kept[1, places] = True
    padded = {n: x.clone() for n, x in t.items()}
    for name in ("key", "value"):
        padded[name][1] = bad
        padded[name][1][:, places] = t[name][1, :, :4]
    mine = problems.leaves(padded | {"E": E, "F": F})
    out = call(mine, mine["E"], mine["F"], saccade.Padding(kept))
    theirs = problems.leaves(t | {"E": E, "F": F})
    alone = {n: theirs[n][1:, :, : 4 if n != "query" else None] for n in t}
    want = torch.cat(
        (dense(*(theirs[n][:1] for n in t), theirs["E"], theirs["F"]), dense(*alone.values(), theirs["E"], theirs["F"]))
    )
    assert_close(out, want)
    got = dict(zip(mine, torch.autograd.grad(out.square().sum(), list(mine.values())), strict=True))
    expected = dict(zip(theirs, torch.autograd.grad(want.square().sum(), list(theirs.values())), strict=True))
    for name in ("key", "value"):
        assert (got[name][1][:, ~kept[1]] == 0).all()
        moved = torch.zeros_like(got[name])
        moved[0], moved[1, :, :4] = got[name][0], got[name][1][:, places]
        got[name] = moved
    for name in got:
        assert_close(got[name], expected[name], terms=512)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_padded_queries_are_zero_and_reach_nothing(bad):
    t, (E, F) = problems.tensors(), projections()
    mask = saccade.Padding([13, 4], queries=[11, 3])
    clean = problems.leaves(t | {"E": E, "F": F})
    dirty = {n: x.clone() for n, x in t.items()}
    dirty["query"][1, :, 3:] = bad
    dirty = problems.leaves(dirty | {"E": E, "F": F})
    outs = [call(x, x["E"], x["F"], mask) for x in (clean, dirty)]
    assert torch.equal(*outs)
    assert (outs[0][1, :, 3:] == 0).all() and (outs[0][1, :, :3] != 0).all()
    upstream = torch.ones_like(outs[0])
    poisoned = upstream.clone()
    poisoned[1, :, 3:] = bad
    grads = [
        torch.autograd.grad(o, list(x.values()), u)
        for o, x, u in zip(outs, (clean, dirty), (upstream, poisoned), strict=True)
    ]
    for one, other in zip(*grads, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


def test_an_item_without_keys_is_zero():
    t, (E, F) = problems.tensors(), projections()
    leaves = problems.leaves(t)
    out = call(leaves, E, F, saccade.Padding([0, 13]), sink=torch.ones(6, dtype=torch.float64))
    assert (out[0] == 0).all() and (out[1] != 0).any()
    assert all((g[0] == 0).all() for g in torch.autograd.grad(out.sum(), list(leaves.values())))


@looped("sizes", [(0, 5, 7), (2, 5, 0), (2, 0, 7), (0, 0, 0)])
@looped("heads", [1, 3])
def test_empty_sizes(sizes, heads):
    batch, rows, keys = sizes
    t, (E, F) = problems.tensors(batch, 6, 3, rows, keys), projections(heads)
    out = call(t, E, F)
    assert out.shape == (batch, 6, rows, 7) and (out == 0).all()


def test_extreme_norms_stay_finite():
    t, (E, F) = problems.tensors(dtype=torch.float32), projections(dtype=torch.float32)
    leaves = problems.leaves(t | {"E": E, "F": F})
    scaled = leaves | {n: leaves[n] * 1e16 for n in ("query", "key", "value")}
    out = call(scaled, leaves["E"], leaves["F"])
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.mean() * 1e-16, list(leaves.values())))


# --- memory and bits --------------------------------------------------------------------------------------------------


def test_nothing_is_length_times_length():
    """The largest tensor is the projection itself or the values; twice the length, twice the size."""
    sizes = []
    for length in (1024, 2048):
        t = problems.leaves(problems.tensors(1, 2, 2, length, length, 8, 8, dtype=torch.float32))
        E = torch.randn(1, 32, length, requires_grad=True)
        with Largest() as largest:
            call(t, E, None).sum().backward()
        sizes.append(largest.numel)
    assert sizes[0] <= 2 * 32 * 1024
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize("heads", [1, 3])
def test_batch_mates_change_no_bit(heads):
    t = problems.tensors(3, 6, 3, 31, 17, 5, 7, dtype=torch.float32)
    E, F = projections(heads, dtype=torch.float32)
    out = call(t, E, F, saccade.Padding([17, 9, 13]))
    alone = call({n: x[1:2] for n, x in t.items()}, E, F, saccade.Padding([9]))
    assert torch.equal(out[1:2], alone)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_with_the_reason():
    t, (E, F) = problems.tensors(), projections()
    with pytest.raises(ValueError, match="mask: Linformer cannot be causal, since each projected key mixes all pos"):
        call(t, E, F, saccade.Causal())
    with pytest.raises(ValueError, match=r"takes Padding\(\.\.\.\), since each projected key mixes.*got Window"):
        call(t, E, F, saccade.Window(3, 3))
    with pytest.raises(ValueError, match=r"key has length \(axis 2\) 13, but key_projection was made for at most 11"):
        call(t, E[..., :11], F[..., :11])
    with pytest.raises(ValueError, match="value_projection: rank 5 is above the length 4: that would be more keys"):
        call({n: x[:, :, :4] for n, x in t.items()}, E, F[..., :4])
    with pytest.raises(ValueError, match=r"value_projection has rank \(axis 1\) 4, expected key_projection's 5"):
        call(t, E, F[:, :4])
    with pytest.raises(ValueError, match=r"key_projection must be \(Hkv or 1, rank, N\) with Hkv = 3.*\(2, 5, 17\)"):
        call(t, E[:2], F)
    with pytest.raises(TypeError, match="key_projection must be a floating-point tensor .* got a int64 tensor"):
        call(t, E.long(), F)
    with pytest.raises(TypeError, match=r"value_projection is torch.float64, expected query's dtype torch.float32"):
        call({n: x.float() for n, x in t.items()}, E.float(), F)


def test_configurations_that_make_no_sense():
    with pytest.raises(ValueError, match="rank: rank 9 is above the length 8"):
        LinformerConfig(8, 9)
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        LinformerConfig(8, 0)
    with pytest.raises(TypeError, match=r"length must be an int, got 8\.0"):
        LinformerConfig(8.0, 2)
    with pytest.raises(ValueError, match="shared: expected one of 'none', 'heads', 'key-value'; got 'layers'"):
        LinformerConfig(8, 2, "layers")
    assert LinformerConfig(8, 8).rank == 8
    assert [LinformerConfig.usual(n).rank for n in (1, 512, 1024, 10**5)] == [1, 128, 256, 256]


def test_one_module_for_all_layers():
    """The paper's layerwise sharing, as the docstring says it."""
    model = Encoder(BlockConfig(AttentionConfig(12, 3, mechanism=LinformerConfig(11, 4, "key-value")), hidden=8), 3)
    before = sum(p.numel() for p in model.parameters())
    layers = model.blocks
    for layer in layers[1:]:
        layer.attention.mechanism = layers[0].attention.mechanism
    assert sum(p.numel() for p in model.parameters()) == before - 2 * 4 * 11
    model(torch.randn(2, 7, 12)).sum().backward()
    assert layers[0].attention.mechanism.key_projection.grad.abs().max() > 0
