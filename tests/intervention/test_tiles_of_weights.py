"""Tiles of weights for functions of them, against dense softmax in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

import saccade
from saccade.intervention import Scale, Weights
from saccade.intervention._tiles_of_weights import TileValues, WeightTiles, tiles_of_rows
from saccade.operator._backends.native import _kernels
from saccade.operator._call import AttentionCall

B, H, HKV, LQ, LK, D, DV = 2, 6, 3, 101, 131, 13, 17
HEADS = [5, 0, 2]
WAYS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(_kernels.module is None, reason="without native kernels")),
]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr("saccade.operator._backends.native._weight_tiles.refuses", lambda call: "not wanted")
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_weighed_in_float32(dtype, way):
    query, key, value = (tensor.to(dtype) for tensor in tensors())
    call = AttentionCall(query, key, value, mask=saccade.Causal())
    # products of bf16 pairs may be rounded to scores with 2^-8 less; what is given is exact
    assert (WeightTiles(call, HEADS).rows(0, LQ) - dense(call)[:, HEADS]).abs().max() <= tolerance(call)


@pytest.mark.parametrize("sink", [-100.0, 3.0])
def test_rows_whose_bias_hides_every_key_are_zero(way, sink):
    bias = torch.zeros(LQ, 1).index_fill(0, torch.tensor([2, 5]), float("-inf"))
    call = AttentionCall(*tensors(), bias=bias, sink=torch.full((H,), sink))
    found = WeightTiles(call, HEADS).rows(0, 7)
    assert bool((found[:, :, [2, 5]] == 0.0).all())
    assert bool((found[:, :, [0, 6]] > 0.0).all())


def test_products_with_values_are_those_of_dense_weights(way):
    value = tensors()[2][:, [2, 0, 1]]
    weights = torch.zeros(B, 3, LQ, LK)
    weights[:, :, 20:60, 100:] = torch.rand(1)  # whole blocks without a weight are left out
    weights[1, 2, 99, 7] = -1.0
    found = TileValues(value, way == "native").times(weights)
    size = weights.double().abs() @ value.double().abs()
    assert bool(((found - weights.double() @ value.double()).abs() <= LK * 2**-24 * size).all())


def test_values_that_are_not_finite_reach_only_rows_with_a_weight_on_them(way):
    value = tensors()[2][:, [2, 0, 1]]
    value[0, 1, 3, 5] = float("inf")
    weights = torch.rand(B, 3, LQ, LK)
    weights[:, :, :50, 3] = 0.0
    found = TileValues(value, way == "native").times(weights).isfinite()
    wanted = torch.ones_like(found)
    wanted[0, 1, 50:, 5] = False
    assert torch.equal(found, wanted)


def model(**arguments):
    class Attending(torch.nn.Module):
        def forward(self, query, key, value):
            return saccade.attention(query, key, value, **arguments)

    return Attending()


def test_a_function_may_keep_its_weights(way, monkeypatch):
    monkeypatch.setattr("saccade.intervention._tiles_of_weights._TILE_BYTES", B * H * LK * 4 * 48)
    kept, call = [], AttentionCall(*tensors(), mask=saccade.Causal())

    def keep(weights, rows):
        kept.append(weights)
        return weights * 0.5

    attending = model(mask=call.mask)
    with saccade.intervene(attending, {"*": Weights(None, keep)}):
        attending(call.query, call.key, call.value)
    assert len(kept) == 3
    assert (torch.cat(kept, 2) - dense(call)).abs().max() <= tolerance(call)


def test_items_that_are_not_chosen_keep_their_dropout(way):
    given = tensors()
    attending = model(dropout=saccade.Dropout(0.5, seed=7))
    plain = attending(*given)
    with saccade.intervene(attending, {"*": Weights(None, lambda weights, rows: weights * 0.0, items=[1])}):
        found = attending(*given)
    with saccade.intervene(attending, {"*": Scale(None, 0.0, items=[1])}):
        assert torch.equal(found, attending(*given))
    assert torch.equal(found[0], plain[0])


@pytest.mark.parametrize("of", ["sink", "bias", "function"])
def test_a_gradient_that_is_wanted_is_refused(of, way):
    tensor = torch.zeros(H if of == "sink" else ()).expand((H,) if of == "sink" else (LQ, LK)).clone().requires_grad_()
    attending = model(**({} if of == "function" else {of: tensor}))
    factor = tensor[0, 0] if of == "function" else 1.0
    with (
        pytest.raises(ValueError, match="Weights is forward only, but a gradient is needed"),
        saccade.intervene(attending, {"*": Weights(None, lambda weights, rows: weights * factor)}),
    ):
        attending(*tensors())


def test_an_empty_batch_is_no_error(way):
    attending = model()
    with saccade.intervene(attending, {"*": Weights([0], lambda weights, rows: weights)}) as run:
        assert attending(*(tensor[:0] for tensor in tensors())).shape == (0, H, LQ, DV)
    assert sum(run.changed.values()) == 1


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
    tiles, row = list(tiles_of_rows(call, list(range(heads)))), batch * heads * keys * 4
    assert max(last - first for first, last in tiles) * row <= max(2**26, row)
    assert [n for tile in tiles for n in range(*tile)] == list(range(1009))
