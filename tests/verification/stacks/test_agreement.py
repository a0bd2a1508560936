"""Agreement: the first layer, head and pair where two implementations differ by construction; equal ones are silent."""

from __future__ import annotations

import copy

import torch
from stacks.layered import Attention, Layered, causal, probed


def agreement(model, **more):
    return probed("agreement", model, causal=True, **more)


def other(model, **changes):
    """A copy of the model whose layers compute by hand, with `changes` of the last layer."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        layer.kernel = "by hand"
    for name, value in changes.items():
        setattr(model.layers[-1], name, value)
    return model


def test_another_kernel_agrees():
    model = Layered(Attention(causal), Attention(causal))
    assert not agreement(model, second=other(model))


def test_the_pair_of_the_layer_and_head_where_a_mask_differs():
    def pairs(length):
        allowed = causal(length).repeat(3, 1, 1)
        allowed[1, 4:, 2] = False
        return allowed

    model = Layered(Attention(causal), Attention(causal), Attention(causal))
    [finding] = agreement(model, second=other(model, pairs=pairs, fast=pairs))
    assert finding.where == "layers.2: layer 2, head 1, query 4, key 2"
    assert [len(document) for document in finding.example] == [5]


def test_a_difference_outside_of_attention():
    model = Layered(Attention(causal))
    second = other(model)
    second.head.bias.data += 0.5
    [finding] = agreement(model, second=second)
    assert "begins outside of attention" in finding.message


def test_scores_that_lose_their_digits_in_float32():
    class Coarse(Attention):
        def forward(self, x, attention_mask, position_ids):
            query, key, value = self.split(x)
            scores = (query @ key.mT + 1e6).masked_fill(~causal(x.shape[1]), -torch.inf)
            return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))

    [finding] = agreement(Layered(Attention(causal), Coarse(causal)))
    assert finding.message.startswith("In float32")
    assert finding.where.startswith("layers.1: layer 1")


def test_outputs_that_are_no_numbers():
    class Empty(Attention):
        def forward(self, x, attention_mask, position_ids):
            self.pairs = self.fast = lambda length: causal(length) & (torch.arange(length) != 0)
            return super().forward(x, None, position_ids)

    [finding] = agreement(Layered(Attention(causal), Empty(causal, kernel="infinite")))
    assert "not finite" in finding.message
    assert finding.where.startswith("layers.1: layer 1, head 0, query 0")


def test_values_that_differ_are_told_from_weights():
    model = Layered(Attention(causal))
    second = other(model)
    with torch.no_grad():
        second.layers[0].qkv.bias[-8:] += 0.5  # the values of head 2
    [finding] = agreement(model, second=second)
    assert finding.where.startswith("layers.0: layer 0, head 2")
    assert "the weights agree" in finding.message
