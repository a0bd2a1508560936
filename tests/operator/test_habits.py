"""What one writes from habit elsewhere: masks of 0 and 1 in floats."""

from __future__ import annotations

import warnings

import pytest
import torch

import saccade
from saccade import Causal, FromTensor, Padding
from saccade.nn import SelfAttention

L = 7
QUERY, KEY = torch.zeros(1, 2, L, 5), torch.zeros(1, 2, L, 5)
TUTORIAL = torch.tril(torch.ones(L, L))
CALLS = {
    "attention": lambda **given: saccade.attention(QUERY, KEY, KEY, **given),
    "attention_with_lse": lambda **given: saccade.attention_with_lse(QUERY, KEY, KEY, **given),
    "attention_weights": lambda **given: saccade.attention_weights(QUERY, KEY, **given),
    "explain": lambda **given: saccade.explain(QUERY, KEY, KEY, **given),
    "statistics": lambda **given: saccade.statistics(QUERY, KEY, **given),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float_mask_of_0_and_1_is_told_of_bool_first(call, dtype):
    with pytest.raises(TypeError) as error:
        call(mask=TUTORIAL.to(dtype))
    message = str(error.value)
    assert 0 < message.index(".bool()") < message.index("bias=")


def test_scores_as_a_mask_are_told_of_bias_alone():
    for scores in (TUTORIAL * 2, TUTORIAL.log(), torch.zeros(L, L)):
        with pytest.raises(TypeError) as error:
            saccade.attention(QUERY, KEY, KEY, scores)
        assert "bias=" in str(error.value) and ".bool()" not in str(error.value)


def test_wherever_a_mask_is_made():
    for make in (
        lambda: SelfAttention(8)(torch.zeros(1, L, 8), mask=TUTORIAL),
        lambda: FromTensor(TUTORIAL),
        lambda: Causal() & TUTORIAL,
        lambda: TUTORIAL.long() | Causal(),
        lambda: Padding(torch.tensor([[1.0, 1.0, 0.0]])),
        lambda: Padding([3], queries=torch.tensor([[1, 1, 0]])),
    ):
        with pytest.raises(TypeError, match=r"\.bool\(\)"):
            make()


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bias_of_0_and_1_warns_at_the_line_of_the_caller(call, dtype):
    for bias in (TUTORIAL, TUTORIAL[None, None], TUTORIAL[2][None, None, None]):
        with pytest.warns(UserWarning, match=r"mask=bias\.bool\(\)") as caught:
            call(bias=bias.to(dtype))
        assert [one.filename for one in caught] == [__file__]


def test_a_line_is_told_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            saccade.attention(QUERY, KEY, KEY, bias=TUTORIAL)
    assert len(caught) == 1


SCORES = {
    "zeros": torch.zeros(L, L),
    "ones": torch.ones(L, L),
    "0 and -inf": TUTORIAL.log(),
    "the last is no 1": torch.cat([TUTORIAL.flatten()[:-1], torch.tensor([0.5])]).view(L, L),
    "learned": TUTORIAL.clone().requires_grad_(),
    "learned, then scaled": TUTORIAL.clone().requires_grad_() * 1,
    "one value": torch.ones(1, 1),
}


@every_call
@pytest.mark.parametrize("name", SCORES)
def test_scores_do_not_warn(call, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(bias=SCORES[name])


def test_nobody_looks_at_a_bias_of_vmap():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(lambda bias: saccade.attention(QUERY, KEY, KEY, bias=bias))(TUTORIAL[None])
