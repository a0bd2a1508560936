"""Path patching where the path is known: the residual stream of a model by hand, written as the sum that it is."""

from __future__ import annotations

import math

import pytest
import torch

import saccade
from models_by_hand import HandModel, decoder, hand_inputs, near_texts
from slowly import slow_after

CLEAN, CORRUPTED = hand_inputs(seed=1), hand_inputs(seed=2)


def metric(out):
    return (torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view_as(out) * out).tanh().sum()


def kept(model, x):
    with torch.no_grad():
        value = metric(model(x))
    return [attention.last for attention in model.attention], value


def stream_before(model, x, outputs, layer):
    """The residual stream that a layer reads, of given outputs (B, H, L, D) of the layers before."""
    for number in range(layer):
        own = model.attention[number]
        written = own.o.weight.unflatten(1, (3, 2))  # (E, H, D)
        x = x + torch.einsum("bhld,ehd->ble", outputs[number], written) + own.o.bias
        x = x + model.feed_forward(x, number)
    return x


def told(model, x, outputs, layer, what):
    """The receivers' queries, keys or values (B, H, L, D) of that stream."""
    return model.attention[layer].split(stream_before(model, x, outputs, layer), what[0])


def with_sender(own, others, layer, head):
    """Outputs of the base run with one head of the other."""
    mixed = [part["output"].clone() for part in own]
    mixed[layer][:, head] = others[layer]["output"][:, head]
    return mixed


@pytest.mark.parametrize("feed_forward", [False, True])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_path_is_the_head_written_into_the_receivers_stream(what, feed_forward):
    """Heads between sender and receiver stay as they are, and the direct way to the metric is closed."""
    model = HandModel(3, feed_forward)
    found = saccade.patching(model, CLEAN, CORRUPTED, metric, by="exact", through=(2, [0, 2], what))
    (own, before), (others, other) = kept(model, CORRUPTED), kept(model, CLEAN)
    for layer in range(2):
        for head in range(3):
            with torch.no_grad():
                given = own[2][what].clone()
                new = told(model, CORRUPTED, with_sender(own, others, layer, head), 2, what)
                given[:, [0, 2]] = new[:, [0, 2]]
                expected = (metric(model(CORRUPTED, {2: {what: given}})) - before) / (other - before)
            value = float(found.exact.by_call()[f"attention.{layer}"][head])
            assert value == pytest.approx(float(expected), abs=1e-12)
            assert abs(value) > 1e-7
    assert found.exact.by_call()["attention.2"].isnan().all()


def test_a_path_of_two_layers_is_a_product_of_matrices():
    """Attention only; the sender reaches the receiver's values, and the metric reads one of its rows.

    change = sum over keys j of w_ij (clean o_j - corrupted o_j) W_O W_V W_O'
    """
    model = HandModel(2, feed_forward=False)

    def reads(out):
        return out[1, 3, 4]

    found = saccade.patching(model, CLEAN, CORRUPTED, reads, through=(1, 2, "value"))
    (own, _), (others, _) = kept(model, CORRUPTED), kept(model, CLEAN)
    with torch.no_grad():
        first, last = model.attention
        weights = torch.softmax(own[1]["query"][1, 2, 3] @ own[1]["key"][1, 2].T / math.sqrt(5), -1)
        for head in range(3):
            moved = (others[0]["output"] - own[0]["output"])[1, head]  # (L, D)
            values = moved @ first.o.weight[:, 2 * head : 2 * head + 2].T @ last.v.weight[4:6].T
            change = last.o.weight[4, 4:6] @ (weights @ values)
            expected = float(change) / (found.clean - found.corrupted)
            assert float(found.exact.values[head]) == pytest.approx(expected, abs=1e-12)
            assert float(found.gradient.values[head]) == pytest.approx(expected, abs=1e-12)  # linear in the sender
            assert abs(expected) > 1e-4


def test_several_receivers_are_told_at_once():
    """The first one's own output is held while the last one is told, and computed when the metric is."""
    model, positions = HandModel(3), [0, 1, 5]
    receivers = [(1, 1, "key"), (2, [0, 2], "query"), (2, 1, "query")]
    found = saccade.patching(model, CLEAN, CORRUPTED, metric, through=receivers, positions=positions)
    (own, before), (others, other) = kept(model, CORRUPTED), kept(model, CLEAN)
    assert [str(one) for one in found.through] == [
        "key of head 1 of attention.1",
        "query of heads 0, 2, 1 of attention.2",
    ]
    for layer in range(2):
        for head in range(3):
            with torch.no_grad():
                mixed = [part["output"].clone() for part in own]
                mixed[layer][:, head, positions] = others[layer]["output"][:, head, positions]
                key = own[1]["key"].clone()
                key[:, 1] = told(model, CORRUPTED, mixed, 1, "key")[:, 1]
                query = told(model, CORRUPTED, mixed, 2, "query")
                patched = metric(model(CORRUPTED, {1: {"key": key}, 2: {"query": query}}))
            expected = float((patched - before) / (other - before))
            assert float(found.exact.by_call()[f"attention.{layer}"][head]) == pytest.approx(expected, abs=1e-12)


def test_receivers_that_nothing_reaches_are_an_error():
    class Towers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = HandModel(1), HandModel(1)

        def forward(self, x):
            return self.one(x) * self.other(x)

    with pytest.raises(ValueError, match="the receivers do not depend on any head before them"):
        saccade.patching(Towers(), CLEAN, CORRUPTED, metric, by="gradient", through=("other.*", 0, "key"))


@pytest.mark.parametrize(
    ("make", "receivers"),
    slow_after(
        2,
        [
            (HandModel, (2, 1, "query")),
            (HandModel, [(1, [0, 1], "value"), (2, 1, "key"), (2, 2, "query")]),
            (decoder, (1, 2, "key")),  # one of the two heads that read the key head
            (decoder, [(1, 2, "value"), (2, [0, 1], "query"), (2, 3, "key")]),
        ],
    ),
)
def test_what_the_first_order_leaves_is_of_the_second(make, receivers):
    """Also of several receivers, where what the first does to the last one's query must not count twice."""
    left, model = [], make(layers=3)
    for near in (1e-3, 1e-4):
        pair = (CLEAN, CLEAN + near * hand_inputs(seed=4)) if make is HandModel else near_texts(near)
        found = saccade.patching(model, *pair, metric, through=receivers)
        there = ~found.exact.values.isnan()
        change = (found.exact.values - found.gradient.values)[there] * (found.clean - found.corrupted)
        left.append(float(change.abs().max()))
        assert found.agreement.pearson > 0.999
    assert 30 < left[0] / left[1] < 300
