"""Corners where an earlier version went wrong: each line of the contract in the case that is easy to miss."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import saccade
from looped import looped
from saccade import ALiBi, Causal, FromTensor, Padding, RelativeBias
from saccade.operator import _tiles

NAN, INF = float("nan"), float("inf")
B, H, L, D = 2, 2, 5, 3


def tensors(batch=B):
    torch.manual_seed(11)
    return [torch.randn(batch, H, L, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def clean(*grads):
    return all(bool(torch.isfinite(grad).all()) for grad in grads)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_a_bias_of_minus_infinity_is_a_mask_for_poison_too(backend):
    query, key, value = tensors()
    bias = torch.zeros(L, L, dtype=torch.float64)
    bias[:, 3], bias[2] = -INF, -INF
    want = torch.autograd.grad(
        saccade.attention(query, key, value, bias=bias, backend=backend).sum(), [query, key, value]
    )
    with torch.no_grad():
        key[:, :, 3], value[:, :, 3], query[:, :, 2] = NAN, INF, NAN
    out = saccade.attention(query, key, value, bias=bias, backend=backend)
    got = torch.autograd.grad(out.sum(), [query, key, value])
    assert clean(out) and bool((out[:, :, 2] == 0).all())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_graph_does_not_keep_the_bias_alive():
    query, key, value = tensors()
    raw = torch.randn(1, H, L, L, dtype=torch.float64, requires_grad=True)
    bias = raw * 2
    watch = weakref.ref(bias)
    out = saccade.attention(query, key, value, bias=bias, backend="chunked")
    out.sum().backward()
    del bias
    gc.collect()
    assert watch() is None
    assert raw.grad is not None


def test_a_poisoned_lse_cotangent_stays_with_its_row():
    grads = {}
    for backend in ("reference", "chunked"):
        query, key, value = tensors()
        out, lse = saccade.attention_with_lse(query, key, value, Causal(), backend=backend)
        cotangent = torch.zeros_like(lse)
        cotangent[:, :, 0] = NAN
        grads[backend] = torch.autograd.grad([out, lse], [query, key, value], [torch.ones_like(out), cotangent])
    for one, other in zip(*grads.values(), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    assert clean(grads["chunked"][1][:, :, 1:])


@looped("dirty", [0, 1, 2])
@looped("mask", [Padding([3, 5]), Causal()])
def test_poisoned_tangents_reach_what_sees_them_and_nothing_else(mask, dirty):
    """Forward mode, eager and under torch.func: NaN where the reference has NaN, no NaN lost and none spread."""
    primals = [tensor.detach() for tensor in tensors()]
    moved = [torch.ones_like(tensor) for tensor in primals]
    moved[dirty][0, :, 4] = NAN
    seen = []
    for backend in ("reference", "chunked"):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, moved, strict=True)]
            seen.append(forward_ad.unpack_dual(saccade.attention(*duals, mask, backend=backend)).tangent)
    call = lambda q, k, v: saccade.attention(q, k, v, mask, backend="chunked")  # noqa: E731
    seen.append(torch.func.jvp(call, tuple(primals), tuple(moved))[1])
    for one in seen[1:]:
        assert torch.equal(one.isnan(), seen[0].isnan())


def test_second_derivatives_never_read_the_cotangent_of_a_padded_key():
    query, key, value = tensors()
    out = saccade.attention(query, key, value, Padding([3, 5]), backend="chunked")
    (d_key,) = torch.autograd.grad(out.square().sum(), key, create_graph=True)
    cotangent = torch.ones_like(d_key)
    want = torch.autograd.grad(d_key, [query, key, value], cotangent, retain_graph=True)
    cotangent[0, :, 3:] = NAN
    got = torch.autograd.grad(d_key, [query, key, value], cotangent)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_merge_never_reads_the_output_of_a_part_that_saw_nothing():
    out = torch.randn(B, H, L, D, requires_grad=True)
    lse, nothing = torch.zeros(B, H, L, requires_grad=True), torch.full((B, H, L), -INF, requires_grad=True)
    merged, whole = saccade.merge([(out, lse), (torch.full_like(out, NAN), nothing)])
    grads = torch.autograd.grad(merged.sum() + whole.sum(), [out, lse, nothing])
    assert torch.equal(merged, out)
    assert clean(*grads)


def test_merge_refuses_integers():
    whole = torch.zeros(B, H, L, D, dtype=torch.int64)
    with pytest.raises(TypeError, match="part 0 must be floating point"):
        saccade.merge([(whole, whole[..., 0])])


@pytest.mark.parametrize("place", ["mask", "bias"])
def test_one_offset_for_the_whole_batch_in_batch_groups(monkeypatch, place):
    monkeypatch.setattr(_tiles, "GROUP", 1)
    query, key, value = tensors(batch=5)
    bias = ALiBi(torch.rand(H, dtype=torch.float64))
    mask = Causal().at([2])
    options = {"bias": bias.at([2])} if place == "bias" else {"bias": bias}
    one = saccade.attention(query, key, value, mask, backend="chunked", **options)
    other = saccade.attention(query, key, value, Causal().at(2), bias=bias, backend="reference")
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@looped("make", [lambda: ALiBi(torch.rand(H)), lambda: RelativeBias(torch.randn(8, H))])
@looped("offset", [1.5, True, [1.7, 2.2], torch.tensor([1.5]), "2", None])
def test_bias_offsets_that_are_no_ints(make, offset):
    with pytest.raises(TypeError, match=r"bias\.at: offset must be an int"):
        make().at(offset)


def test_bias_offsets_of_another_batch():
    query, key, value = (tensor.detach() for tensor in tensors())
    bias = ALiBi(torch.rand(H, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"placed by 3 offsets, expected one per batch item \(2\)"):
        saccade.attention(query, key, value, bias=bias.at([1, 2, 3]))
    with pytest.raises(ValueError, match="already placed"):
        bias.at(1).at(2)
    same = saccade.attention(query, key, value, bias=bias.at(np.int64(3)))
    assert torch.equal(same, saccade.attention(query, key, value, bias=bias.at(torch.tensor(3))))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_sink_switched_off_by_minus_infinity(backend):
    query, key, value = tensors()
    sink = torch.full((H,), -INF, dtype=torch.float64, requires_grad=True)
    mask = Padding([4, 5], queries=[2, 5])
    out, lse = saccade.attention_with_lse(query, key, value, mask, sink=sink, backend=backend)
    plain, plain_lse = saccade.attention_with_lse(query, key, value, mask, backend=backend)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    (grad,) = torch.autograd.grad(out.sum() + lse[torch.isfinite(lse)].sum(), sink)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_sdpa_needs_no_dense_mask_for_padded_queries():
    """The attn_mask that F.sdpa receives has one row."""
    query, key, value = tensors()
    mask = Padding([3, 5], queries=[4, 2])
    received = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **options):
        received.append(options["attn_mask"])
        return kernel(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("saccade.operator._backends.sdpa._SDPA", spy)
        out = saccade.attention(query, key, value, mask, backend="sdpa")
    assert received[0].shape == (B, 1, 1, L)
    torch.testing.assert_close(
        out, saccade.attention(query, key, value, mask, backend="reference"), rtol=1e-12, atol=1e-12
    )


def test_sdpa_refuses_a_mask_and_bias_that_are_larger_together():
    query, key, value = tensors()
    seen = FromTensor(torch.ones(B, 1, 1, L, dtype=torch.bool))
    with pytest.raises(ValueError, match="larger dense tensor"):
        saccade.attention(query, key, value, seen, bias=torch.zeros(1, H, L, L, dtype=torch.float64), backend="sdpa")


def test_vectorised_jacobians():
    query, key, value = (tensor.detach() for tensor in tensors())
    function = lambda q: saccade.attention(q, key, value, Causal(), backend="chunked")  # noqa: E731
    one, other = (torch.autograd.functional.jacobian(function, query, vectorize=v) for v in (True, False))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_of_nothing_and_of_numpy_indices():
    query, key, _ = (tensor.detach() for tensor in tensors())
    assert saccade.attention_weights(query, key, heads=[]).shape == (B, 0, L, L)
    assert saccade.attention_weights(query, key, rows=[], keys=[1]).shape == (B, H, 0, 1)
    picked = saccade.attention_weights(query, key, rows=np.int64(1), keys=[np.int64(2), -1])
    torch.testing.assert_close(picked, saccade.attention_weights(query, key)[:, :, 1:2, [2, 4]], rtol=1e-12, atol=1e-12)


def test_a_slice_that_says_where_its_queries_stand_is_enough():
    query, key, value = (tensor.detach() for tensor in tensors())
    bias = ALiBi(torch.rand(H, dtype=torch.float64))
    rows, keys = (1, 4), (0, 3)
    whole = Padding([5, 4]).slice(rows, keys) & Causal().slice(rows, keys, lengths=(L, L))
    part = query[:, :, 1:4], key[:, :, :3], value[:, :, :3]
    one = saccade.attention(*part, whole, bias=bias, backend="chunked")
    placed = (Padding([3, 3]) & Causal()).at(1)
    other = saccade.attention(*part, placed, bias=bias, backend="reference")
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="a slice without the positions of its queries"):
        saccade.attention(*part, Padding([5, 4]).slice(rows, keys), bias=bias)


def test_numbers_beyond_every_float():
    query, key, value = (tensor.detach() for tensor in tensors())
    with pytest.raises(ValueError, match="scale must be finite"):
        saccade.attention(query, key, value, scale=10**400)
    with pytest.raises(ValueError, match="softcap must be positive and finite"):
        saccade.attention(query, key, value, softcap=10**400)
    assert clean(saccade.attention(query, key, value, dropout=np.float32(0.1)))


def test_a_constant_bias_costs_no_gradient(monkeypatch):
    """Slopes that need no gradient are not pulled back to."""
    query, key, value = tensors()
    pulled = []
    monkeypatch.setattr(ALiBi, "_pull", lambda *args: pulled.append(1))
    slopes = torch.rand(H, dtype=torch.float64)
    saccade.attention(query, key, value, bias=ALiBi(slopes), backend="chunked").sum().backward()
    assert not pulled


def test_half_precision_biases_are_cut_before_they_are_widened():
    """No float32 copy of a whole bfloat16 bias is ever made."""
    length = 3 * _tiles.ROWS
    query, key, value = (torch.randn(1, 1, length, 8, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(length, length, dtype=torch.bfloat16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                largest = max(largest, out.numel())
            return out

    with Watch():
        out = saccade.attention(query, key, value, bias=bias, softcap=5.0, backend="chunked")
    assert out.dtype == torch.bfloat16
    assert largest <= _tiles.ROWS * max(_tiles.KEYS, 16)


@looped("placement", [3, torch.tensor([2, 0])])
@looped("make", [ALiBi, RelativeBias])
def test_diagonals_are_the_distances(make, placement):
    """Tiles laid out from r + c - 1 scores equal each pair's own score, and `pull` is the transpose of `tile`."""
    from saccade.operator._biases import Span

    torch.manual_seed(2)
    shape = (H,) if make is ALiBi else (8, H)
    parameter = torch.rand(shape, dtype=torch.float64)
    bias = make(parameter)
    rows, keys = Span(4, 11, torch.arange(4, 11)), Span(3, 14, torch.arange(3, 14))
    tile = bias._tile(parameter, rows, keys, placement, torch.float64)
    scattered = [Span(s.start, s.stop, s.index, unbroken=False) for s in (rows, keys)]
    assert torch.equal(tile, bias._tile(parameter, *scattered, placement, torch.float64))
    for b, offset in enumerate([placement] if isinstance(placement, int) else placement.tolist()):
        for i, j in ((4, 3), (10, 13), (7, 9)):
            want = bias._value(parameter, torch.arange(H), torch.tensor(j - i - offset))
            assert torch.equal(tile[b, :, i - 4, j - 3], want)
    cotangent = torch.randn(B, H, 7, 11, dtype=torch.float64)
    for spans in ((rows, keys), scattered):
        pulled = bias._pull(cotangent, parameter, *spans, placement)
        assert math.isclose((pulled * parameter).sum(), (cotangent * tile).sum(), rel_tol=1e-12)
