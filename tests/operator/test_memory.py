"""`chunked` never holds Lq x Lk numbers, in any derivative, and does no work for empty tiles."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import problems
import saccade
from recording import Largest, saved
from slowly import slow_but

LONG = 8192
WINDOW = 61


def draw(length, *, batch=1, heads=1, width=4):
    named = problems.tensors(batch, heads, 1, length, length, width, 3, dtype=torch.float32)
    return problems.leaves(named)


def local():
    return saccade.Causal() & saccade.Window(WINDOW, None)


def forward_and_backward(leaves, mask, **options):
    out, lse = saccade.attention_with_lse(*leaves.values(), mask, backend="chunked", **options)
    torch.autograd.grad(out.sum() + torch.where(lse == -torch.inf, 0.0, lse).sum(), list(leaves.values()))


def double_backward(leaves, mask, **options):
    out = saccade.attention(*leaves.values(), mask, backend="chunked", **options)
    first = torch.autograd.grad(out.sin().sum(), list(leaves.values()), create_graph=True)
    torch.autograd.grad(sum(g.sin().sum() for g in first), list(leaves.values()))


def forward_mode(leaves, mask, **options):
    with fwd.dual_level():
        dual = [fwd.make_dual(t.detach(), torch.ones_like(t)) for t in leaves.values()]
        pushed = saccade.attention_with_lse(*dual, mask, backend="chunked", **options)
        assert all(fwd.unpack_dual(x).tangent is not None for x in pushed)


WAYS = (forward_and_backward, forward_mode, double_backward)
MASKS = {
    "none": lambda length: None,
    "causal": lambda length: saccade.Causal(),
    "window": lambda length: local(),
    "padding": lambda length: saccade.Padding(torch.tensor([length - 3])),
}


@pytest.mark.parametrize("way", slow_but(WAYS, forward_and_backward))
@pytest.mark.parametrize(
    ("mask", "length"),
    [("none", 1536), ("padding", 1536), ("window", LONG), pytest.param("causal", LONG, marks=pytest.mark.slow)],
)
def test_no_tensor_of_lq_times_lk(way, mask, length):
    with Largest() as largest:
        way(draw(length), MASKS[mask](length))
    # a tile or two, and what is linear in length; far below anything quadratic
    assert largest.numel < length * length // 16


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["alibi", "relative"])
@pytest.mark.parametrize("way", WAYS)
def test_bias_values_and_dropout_take_no_lq_times_lk(way, bias):
    parameter = {"alibi": torch.ones(1), "relative": torch.zeros(32, 1)}[bias].requires_grad_()
    value = {"alibi": saccade.ALiBi, "relative": saccade.RelativeBias}[bias](parameter)
    sizes = []
    for length in (512, 1024):
        with Largest() as largest:
            way(draw(length), saccade.Causal(), bias=value, dropout=0.2, sink=torch.zeros(1))
        sizes.append(largest.numel)
    # a tile of some 256 x 256, perhaps by 32 buckets, whatever the length
    assert sizes[1] <= 2 * sizes[0], sizes


def test_a_large_batch_is_taken_in_turn():
    with Largest() as largest:
        saccade.attention(*draw(256, batch=64, heads=2).values(), backend="chunked")
    assert largest.numel < 64 * 2 * 256 * 256


@pytest.mark.parametrize("order", [1, 2])
def test_what_the_graph_keeps_grows_with_length_not_its_square(order):
    totals = []
    for length in (1024, 2048):
        leaves = draw(length)
        with saved() as kept:
            out, lse = saccade.attention_with_lse(*leaves.values(), saccade.Causal(), backend="chunked")
            total = out.sum() + lse.sum()
            if order == 2:
                torch.autograd.grad(total, list(leaves.values()), create_graph=True)
        totals.append(sum(kept.values()))
    assert totals[0] > 1024 and totals[1] < 2.2 * totals[0], totals


def flops(way, length, mask):
    with FlopCounterMode(display=False) as counter:
        way(draw(length), mask)
    return counter.get_total_flops()


@pytest.mark.parametrize("way", slow_but(WAYS, forward_and_backward))
def test_work_for_a_window_grows_linearly(way):
    short, long = (flops(way, length, local()) for length in (2048, 8192))
    assert short > 0
    # 4 for four times the length, a tenth more for ragged ends; 16 if empty tiles were visited
    assert long < 4.4 * short


@pytest.mark.slow
@pytest.mark.parametrize("way", slow_but(WAYS, forward_and_backward))
def test_causal_work_is_about_half(way):
    whole, causal = flops(way, 2048, None), flops(way, 2048, saccade.Causal())
    # half, and half a tile for each row: tiles of 256 of 2048 leave 0.5 + 1/16
    assert 0 < causal < 0.6 * whole


@pytest.mark.slow
def test_padding_and_documents_skip_work_too():
    whole = flops(forward_and_backward, 2048, None)
    assert flops(forward_and_backward, 2048, saccade.Padding(torch.tensor([256]))) < 0.2 * whole
    ids = torch.arange(2048) // 256
    assert flops(forward_and_backward, 2048, saccade.Documents(ids[None])) < 0.3 * whole


def test_one_decoding_step_holds_no_more_than_its_cache():
    named = problems.tensors(1, 2, 1, 1, LONG, 4, 3, dtype=torch.float32)
    with Largest() as largest:
        saccade.attention(*named.values(), saccade.Causal(), backend="chunked")
    assert largest.numel <= 2 * LONG * 4


def test_strided_inputs_are_read_without_a_copy():
    # (B, L, H, D) storage: a copy of the keys would be one tensor of all their elements with storage of its own
    wide = torch.randn(1, LONG, 3, 2, 4)
    query, key, value = (wide[:, :, n].transpose(1, 2) for n in range(3))
    made = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() >= key.numel():
                made.append((str(func), result.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()))
            return result

    with Copies():
        saccade.attention(query, key, value, local(), backend="chunked")
    copies = [name for name, shared in made if not shared and any(w in name for w in ("copy", "clone", "contiguous"))]
    assert made and not copies
