"""flex_attention with its code exchanged: whom it asks, through whichever reference, and what it leaves behind.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import flex_attention

from saccade.interception._hooks import flex_handled_by

CODE = flex_attention.__code__
SHAPE = 2, 3, 5, 7  # B, H, L, D


@pytest.fixture(autouse=True)
def everything_is_put_back(monkeypatch):
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # eager, without the compiler
    yield
    assert flex_attention.__code__ is CODE and module.flex_attention is flex_attention


@pytest.fixture
def qkv():
    return tuple(torch.randn(SHAPE) for _ in range(3))


def plus_one(call, proceed):
    return proceed() + 1


def doubled(call, proceed):
    return proceed() * 2


def test_a_handler_answers_every_reference_in_its_block_only(qkv):
    expected = flex_attention(*qkv)
    with flex_handled_by(plus_one):
        assert torch.equal(flex_attention(*qkv), expected + 1)
        assert torch.equal(module.flex_attention(*qkv), expected + 1)
    assert torch.equal(flex_attention(*qkv), expected)


def test_the_inner_handler_is_asked_first_and_its_calls_go_outwards(qkv):
    expected = flex_attention(*qkv)
    with flex_handled_by(plus_one), flex_handled_by(doubled):
        assert torch.equal(flex_attention(*qkv), (expected + 1) * 2)
    with flex_handled_by(plus_one), flex_handled_by(lambda call, proceed: flex_attention(*call[:3])):
        assert torch.equal(flex_attention(*qkv), expected + 1)


def test_blocks_end_in_any_order_and_after_exceptions(qkv):
    first, second = ExitStack(), ExitStack()
    first.enter_context(flex_handled_by(plus_one))
    second.enter_context(flex_handled_by(doubled))
    first.close()
    expected = torch.nn.functional.scaled_dot_product_attention(*qkv)
    torch.testing.assert_close(flex_attention(*qkv), expected * 2)
    second.close()
    with pytest.raises(ZeroDivisionError), flex_handled_by(lambda call, proceed: 1 / 0):
        flex_attention(*qkv)


def test_other_threads_are_not_asked(qkv):
    answers, expected = [], flex_attention(*qkv)
    with flex_handled_by(plus_one):
        thread = threading.Thread(target=lambda: answers.append(flex_attention(*qkv)))
        thread.start()
        thread.join()
    assert torch.equal(answers[0], expected)


def test_arguments_arrive_by_name_whichever_way_they_were_given(qkv):
    seen, query, key, value = [], *qkv

    def look(call, proceed):
        seen.append(call)
        return call.query

    def score_mod(score, b, h, q, k):
        return score

    request = module.AuxRequest(lse=True)
    with flex_handled_by(look):
        flex_attention(query, key, value, score_mod, None, 0.3, True, kernel_options={"BLOCK_M": 16})
        flex_attention(value=value, key=key, query=query, scale=0.3, score_mod=score_mod, return_aux=request)
        with pytest.raises(TypeError, match="flex_attention.* unexpected keyword argument 'scael'"):
            flex_attention(*qkv, scael=0.3)
    assert seen[0] == (query, key, value, score_mod, None, 0.3, True, False, {"BLOCK_M": 16}, None)
    assert seen[1] == (query, key, value, score_mod, None, 0.3, False, False, None, request)
