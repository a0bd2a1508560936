"""Tiles of weights for functions of them, against dense softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import saccade
from saccade._backends.native import _kernels
from saccade._call import AttentionCall
from saccade.intervention._tiles_of_weights import WeightTiles, most_rows, tiles_of_rows

B, H, HKV, LQ, LK, D, DV = 2, 6, 3, 101, 131, 13, 17
HEADS = [5, 0, 2]
WAYS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(_kernels.module is None, reason="without native kernels")),
]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr("saccade._backends.native._weight_tiles.refuses", lambda call: "not wanted")
    return request.param


def tensors():
    shapes = (H, LQ, D), (HKV, LK, D), (HKV, LK, DV)
    return [torch.randn(B, *shape) for shape in shapes]


def masks():
    lengths = torch.tensor([LK, 3])
    each = [saccade.Window(left, 2) for left in range(H)]
    return {
        "none": None,
        "causal": saccade.Causal(),
        "gaps": saccade.Window(9, 0) | saccade.Columns(4),  # keys of a row that do not lie together
        "padding and heads": saccade.Padding(lengths) & saccade.PerHead(each),  # rows that see nothing
    }


def dense(call):
    """(B, H, Lq, Lk) in float64, by the formula."""
    key = call.key.double().repeat_interleave(H // HKV, 1)
    logits = call.query.double() @ key.transpose(-1, -2) * D**-0.5
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias.double()
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask.dense(LQ, LK), float("-inf"))
    sink = torch.full((H,), float("-inf")).double() if call.sink is None else call.sink.double()
    parts = torch.cat([logits, sink.view(1, H, 1, 1).expand(B, -1, LQ, 1)], -1)
    return torch.softmax(parts, -1)[..., :LK].nan_to_num(0.0)


def tolerance(call):
    """Of a weight: twice the error of its logit, which is 2^-24 of its terms' sizes for each of D steps, and 8 more."""
    key = call.key.double().abs().repeat_interleave(H // HKV, 1)
    sizes = call.query.double().abs() @ key.transpose(-1, -2) * D**-0.5
    return 2 * 2**-24 * (D * sizes.max().item() + 8)


@pytest.mark.parametrize("mask", ["none", "causal", "gaps", "padding and heads"])
def test_rows_are_those_of_a_dense_softmax(mask, way):
    for bias, softcap, sink in itertools.product(
        (None, torch.randn(1, H, LQ, LK)), (None, 2.0), (None, torch.randn(H))
    ):
        call = AttentionCall(*tensors(), mask=masks()[mask], bias=bias, softcap=softcap, sink=sink)
        tiles = WeightTiles(call, HEADS)
        # tiles that begin and end within the kernels' blocks of 48 rows, and two of one size
        found = torch.cat([tiles.rows(*rows).clone() for rows in ((0, 7), (7, 14), (14, 97), (97, LQ))], 2)
        assert (found - dense(call)[:, HEADS]).abs().max() <= tolerance(call)


def test_what_a_function_writes_reaches_the_values_and_no_later_tile(way):
    query, key, value = tensors()
    call = AttentionCall(query, key, value, mask=saccade.Causal())
    tiles, wanted = WeightTiles(call, HEADS), dense(call)[:, HEADS]
    wide = tiles.value(value[:, [2, 0, 1]])
    values = value[:, [2, 0, 1]].double()
    for first, last in ((0, 30), (30, 60), (60, 90)):
        weights = tiles.rows(first, last)
        assert (weights - wanted[:, :, first:last]).abs().max() <= tolerance(call)
        if first == 0:
            weights[..., LK - 1] = 1.0  # a key that the mask hides
        elif first == 30:
            weights[..., LK - 2] = 1.0
            weights = weights.clone()  # another tensor: what was written stays in the tile's own memory
        out = wide.new_empty(B, len(HEADS), last - first, wide.shape[3])
        tiles.weighted(weights, wide, out)
        size = weights.double().abs() @ values.abs()
        assert bool(((out[..., :DV] - weights.double() @ values).abs() <= LK * 2**-24 * size).all())


@pytest.mark.skipif(_kernels.module is None, reason="without native kernels")
def test_rows_have_the_same_bits_whatever_tile_they_are_in():
    call = AttentionCall(*tensors(), mask=saccade.Causal())
    whole = WeightTiles(call, HEADS).rows(0, LQ)
    one_item = AttentionCall(call.query[1:], call.key[1:], call.value[1:], mask=saccade.Causal())
    assert torch.equal(WeightTiles(one_item, [2]).rows(50, 60)[0, 0], whole[1, 2, 50:60])


@pytest.mark.parametrize("batch, heads, keys", [(1, 1, 5), (1, 12, 2048), (64, 32, 100_003), (1, 1, 2**28)])
def test_tiles_take_bounded_memory(batch, heads, keys):
    shape = torch.empty(1).expand
    call = AttentionCall(shape(batch, heads, 1009, 1), shape(batch, heads, keys, 1), shape(batch, heads, keys, 1))
    chosen = list(range(heads))
    row = batch * heads * keys * 4
    assert most_rows(call, chosen) * row <= max(2**26, row)
    rows = [n for first, last in tiles_of_rows(call, chosen) for n in range(first, last)]
    assert rows == list(range(1009))
