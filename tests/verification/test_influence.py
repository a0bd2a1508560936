"""Which outputs depend on which inputs: against masks that are known.

Shape legend: B batch, H heads, L length, D head width.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.verification import Promise, Reading
from saccade.verification.subject._influence import (
    apart,
    dependence,
    direction,
    effects,
    gradients,
    is_causal,
    later,
    steady,
)
from saccade.verification.subject._inputs import NamedInputs, Side
from saccade.verification.subject._subject import Subject

D, E, H, L = 5, 12, 2, 7
ATTENTION = Reading("attention", "BHLD", D, heads=H)
BOOL = torch.bool


def subject(mask: Tensor | None = None) -> Subject:
    return Subject(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), ATTENTION)


def random_mask(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    return mask | torch.eye(shape[-2], shape[-1], dtype=BOOL)


def influence(one: Subject, inputs: NamedInputs, side: Side = "key") -> Tensor:
    """(Lq, Lk) booleans: whether output i changes when input j does, in any batch item, head or channel."""
    return (effects(steady(one, inputs), inputs, side=side) > 0).flatten(0, 1).any(0)


def test_influence_is_the_mask() -> None:
    mask = random_mask(L, L + 2)
    one = subject(mask)
    assert influence(one, one.inputs(2, L, L + 2)).equal(mask)


def test_effects_tell_items_and_heads_apart() -> None:
    mask = random_mask(3, H, L, L)
    one = subject(mask)
    inputs = one.inputs(3, L)
    assert (effects(steady(one, inputs), inputs) > 0).equal(mask)


def test_queries_have_an_influence_on_themselves_alone() -> None:
    one = subject()
    inputs = one.inputs(2, L)
    found = effects(steady(one, inputs), inputs, side="query") > 0
    assert found.equal(torch.eye(L, dtype=BOOL).expand_as(found))


def test_what_comes_later_is_changed_at_once() -> None:
    mask = torch.ones(L, L, dtype=BOOL).tril()
    mask[1, 5] = True
    one = subject(mask)
    inputs = one.inputs(2, L)
    called = steady(one, inputs)
    assert later(called, inputs, 4)[..., 1].gt(0).all()
    assert not later(called, inputs, 5).any()
    assert not later(called, inputs, 4)[..., [0, 2, 3, 4]].any()


def test_gradients_reach_what_is_seen() -> None:
    mask = random_mask(L, L)
    one = subject(mask)
    for row in range(L):
        found = gradients(one, one.inputs(2, L), row, "key") > 0
        assert found.equal(mask[row].expand(2, L))


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (torch.ones(L, L, dtype=BOOL).tril(), "causal"),
        (torch.ones(L, L, dtype=BOOL), "bidirectional"),
        (torch.ones(L, L, dtype=BOOL).tril(1), "neither"),
        (torch.ones(L, L, dtype=BOOL).triu(), "neither"),
    ],
)
def test_direction(mask: Tensor, wanted: str) -> None:
    assert direction(subject(mask)) == wanted


def test_a_faint_leak_is_not_bidirectional() -> None:
    def faint(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT
        return scores.masked_fill(~torch.ones(L, L, dtype=BOOL).tril(), -14.0).softmax(-1) @ value

    one = Subject(faint, ATTENTION)
    assert direction(one) == "neither" and is_causal(one)


def test_decoders_are_causal_in_their_own_sequence() -> None:
    layer = nn.TransformerDecoderLayer(E, H, 2 * E, batch_first=True).eval()
    hidden = torch.ones(L, L, dtype=BOOL).triu(1)
    reading = Reading("cross", "BLD", E)
    assert direction(Subject(layer, reading)) == "bidirectional"
    assert direction(Subject(layer, replace(reading, constants={"tgt_mask": hidden}))) == "causal"


def test_cross_attention_alone_is_judged_by_its_context() -> None:
    class Cross(nn.Module):
        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, context, context)

    one = Subject(Cross(), Reading("cross", "BLD", E))
    assert direction(one) == "bidirectional" and not is_causal(one)
    assert dependence(one, L).gt(0).all()


def test_a_promise_comes_before_what_is_found() -> None:
    assert is_causal(replace(subject(), promise=Promise(causal=True)))


def test_dropout_draws_the_same_and_the_callers_generator_goes_on() -> None:
    one = Subject(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), ATTENTION)
    inputs = one.inputs(2, L)
    torch.manual_seed(6)
    wanted = torch.rand(3)
    torch.manual_seed(6)
    called = steady(one, inputs)
    assert not called.copied and called.noise == 0
    assert called(inputs).equal(called(inputs))
    assert torch.rand(3).equal(wanted)


def test_what_remembers_is_called_on_copies() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    target = Counting()
    one = Subject(target, Reading("self", "BLD", E))
    assert influence(one, one.inputs(2, L), side="both").equal(torch.eye(L, dtype=BOOL))
    assert target.calls == 0


def test_noise_is_no_influence() -> None:
    generator = torch.Generator().manual_seed(1)

    def noisy(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        jitter = 1e-6 * torch.rand((), generator=generator)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True) + jitter

    one = Subject(noisy, ATTENTION)
    assert influence(one, one.inputs(2, L)).equal(torch.ones(L, L, dtype=BOOL).tril())


def test_one_tensor_under_three_names_comes_apart() -> None:
    one = Subject(nn.MultiheadAttention(E, H, batch_first=True).eval(), Reading("qkv", "BLD", E, out=0))
    inputs = one.one_sequence(one.inputs(2, L))
    assert len({id(tensor) for tensor in apart(inputs).tensors.values()}) == 3
    assert influence(one, inputs).all()


def test_nan_equals_nan() -> None:
    mask = torch.ones(L, L, dtype=BOOL).tril()

    def emptied(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query @ key.mT).masked_fill(~mask.tril(-1), float("-inf"))
        return scores.softmax(-1) @ value

    one = Subject(emptied, ATTENTION)
    assert influence(one, one.inputs(2, L)).equal(mask.tril(-1))
