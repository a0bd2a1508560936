"""Padded keys tell of padded queries in self-attention alone: which of the two a call is, is followed, not guessed."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.monitoring._record import ROWS_UNKNOWN

B, L, H, D = 3, 11, 2, 6
E = H * D
REAL = torch.tensor([7, 11, 2])[:, None] > torch.arange(L)
SEEN = REAL[:, None, None]


def heads_of(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, SEEN)


def by_hand(q, k, v):
    return ((q @ k.mT) / math.sqrt(D)).masked_fill(~SEEN, -math.inf).softmax(-1) @ v


def rotated(x):
    angle = torch.arange(x.shape[-2])[:, None] * torch.tensor([1.0, 0.1, 0.01]).repeat(2)
    half = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * angle.cos() + half * angle.sin()


def turned(x):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = torch.polar(torch.ones(L, D // 2), torch.arange(L)[:, None] * torch.ones(D // 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Model(nn.Module):
    """Layers, and a forward made of them."""

    def __init__(self, function):
        super().__init__()
        self.function, self.num_heads = function, H
        self.q, self.k, self.v = (nn.Linear(E, E) for _ in range(3))
        self.qkv, self.wide = nn.Linear(E, 3 * E), nn.Parameter(torch.randn(E, 3 * E))
        self.one, self.other, self.narrow = nn.LayerNorm(E), nn.LayerNorm(E), nn.LayerNorm(D)
        self.queries, self.places = nn.Parameter(torch.randn(L, E)), nn.Embedding(L, E)
        self.multi = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def separate(m, x):
    return heads_of(m.q(m.one(x))), heads_of(m.k(m.other(x))), heads_of(m.v(x))


def fused(m, x):
    return (heads_of(part) for part in m.qkv(x).chunk(3, -1))


def unbound(m, x):
    return m.qkv(x).view(B, L, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def weights_alone(m, x):
    return (
        heads_of(part)
        for part in torch.addmm(m.queries[0].repeat(3), x.view(-1, E), m.wide).view(B, L, -1).split(E, -1)
    )


def summed(m, x):
    weight = m.wide.view(E, 3, H, D)
    return torch.einsum("ble,ethd->tbhld", x, weight).unbind()


def with_places(m, x):
    placed = x + m.places(torch.arange(L))
    return heads_of(m.q(placed)), heads_of(m.k(placed)), heads_of(m.v(x))


def turning(m, x):
    q, k, v = separate(m, x)
    return rotated(m.narrow(q)), rotated(m.narrow(k)), v


def turning_pairs(m, x):
    q, k, v = separate(m, x)
    return turned(q), turned(k), v


def deeper(m, x):
    for _ in range(2):
        x = x + sdpa(*separate(m, x)).transpose(1, 2).flatten(2)
        x = x + m.q(F.gelu(m.k(m.one(x))))
    return separate(m, x)


SELF = [separate, fused, unbound, weights_alone, summed, with_places, turning, turning_pairs, deeper]


def seen_of(model, *inputs):
    with torch.no_grad(), saccade.watch(model, keep=True) as seen:
        model(*inputs)
    assert not seen.unobserved
    return seen


def rows_that_count(seen):
    """(B, Lq) bool of the last call: rows whose weights are not all 0."""
    name = seen.calls[-1].name
    found = seen.weights(name)
    rows = found.sum(-1) > 0
    assert seen.aggregates[name][0]["entropy"].count == rows[:, 0].sum()
    assert (rows == rows[:, :1]).all()
    return rows[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("attention", [sdpa, by_hand])
@pytest.mark.parametrize("parts", SELF)
def test_padded_tokens_of_self_attention_are_no_queries(parts, attention):
    seen = seen_of(Model(lambda m, x: attention(*parts(m, x))), torch.randn(B, L, E))
    assert torch.equal(rows_that_count(seen), REAL)
    assert not seen.unknown


def test_lengths_that_are_widths_too_change_nothing():
    # Cut along the width: a part that is as wide as the sequence is long is no part of the sequence.
    x = torch.randn(B, L, L)
    model = nn.Module()
    model.qkv = nn.Linear(L, 3 * L)
    model.forward = lambda x: sdpa(*(part[:, None] for part in model.qkv(x).chunk(3, -1)))
    assert torch.equal(rows_that_count(seen_of(model, x)), REAL)


def cross(m, x, memory):
    return heads_of(m.q(x)), heads_of(m.k(memory)), heads_of(m.v(memory))


def decoder(m, x, memory):
    for _ in range(2):
        x = x + F.scaled_dot_product_attention(*separate(m, x), is_causal=True).transpose(1, 2).flatten(2)
        x = x + sdpa(*cross(m, m.one(x), m.other(memory))).transpose(1, 2).flatten(2)
    return cross(m, x, memory)


def learned(m, x, memory):
    return cross(m, m.queries.expand(B, L, E), memory)


def halves(m, x, memory):
    both = m.one(torch.cat([x, memory], 1))
    return cross(m, both[:, :L], both[:, L:])


def rotary_cross(m, x, memory):
    q, k, v = cross(m, x, memory)
    return rotated(q), rotated(k), v


@pytest.mark.parametrize("attention", [sdpa, by_hand])
@pytest.mark.parametrize("parts", [cross, decoder, learned, halves, rotary_cross])
def test_queries_of_another_sequence_all_count(parts, attention):
    x, memory = torch.randn(B, L, E), torch.randn(B, L, E)
    seen = seen_of(Model(lambda m, x, memory: attention(*parts(m, x, memory))), x, memory)
    assert rows_that_count(seen).all()
    assert not seen.unknown


def test_multihead_attention_that_is_given_one_sequence_in_two_tensors():
    hidden = {"key_padding_mask": ~REAL}
    own = Model(lambda m, x: m.multi(m.one(x), m.other(x), x, **hidden)[0])
    two = Model(lambda m, x, memory: m.multi(m.one(x), m.one(memory), memory, **hidden)[0])
    x = torch.randn(B, L, E)
    assert torch.equal(rows_that_count(seen_of(own, x)), REAL)
    assert rows_that_count(seen_of(two, x, x.clone())).all()


@pytest.mark.parametrize("attention", [sdpa, by_hand])
@pytest.mark.parametrize("change", ["given as they are", "moved"])
def test_what_is_not_known_is_said_and_loses_no_row(attention, change, tmp_path):
    def given(m, x):
        q, k, v = separate(m, x)
        return attention(q, k.gather(-2, torch.arange(L).flip(0)[:, None].expand(k.shape)), v)

    if change == "moved":
        seen = seen_of(Model(given), torch.randn(B, L, E))
    else:
        seen = seen_of(Model(lambda m, *parts: attention(*parts)), *(torch.randn(B, H, L, D) for _ in range(3)))
    assert rows_that_count(seen).all()
    assert seen.unknown[""].count == 1 and seen.unknown[""].reason == ROWS_UNKNOWN
    assert "Not known:\n  the model (1): some keys are padding" in str(seen) and ROWS_UNKNOWN in seen._repr_html_()
    seen.save(tmp_path / "run.safetensors")
    assert saccade.monitoring.load(tmp_path / "run.safetensors").unknown == seen.unknown


def test_without_padding_there_is_nothing_to_know():
    seen = seen_of(Model(lambda m, *parts: F.scaled_dot_product_attention(*parts)), *torch.randn(3, B, H, L, D))
    assert not seen.unknown
