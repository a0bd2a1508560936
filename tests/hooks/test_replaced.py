"""The replaced function: whom it asks, what it leaves behind, and what others may do to it meanwhile.

B batch, H heads, L length, D width.
"""

from __future__ import annotations

import copy
import inspect
import threading
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from saccade.interception._hooks import mha_handled_by, sdpa_handled_by

ORIGINAL = F.scaled_dot_product_attention
SHAPE = 2, 3, 5, 7  # B, H, L, D


@pytest.fixture(autouse=True)
def everything_is_put_back():
    before = F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert (F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()) == before


@pytest.fixture
def qkv():
    return tuple(torch.randn(SHAPE) for _ in range(3))


def plus_one(call, proceed):
    return proceed() + 1


def doubled(call, proceed):
    return proceed() * 2


def test_a_handler_answers_in_its_block_only(qkv):
    expected = ORIGINAL(*qkv)
    with sdpa_handled_by(plus_one):
        torch.testing.assert_close(F.scaled_dot_product_attention(*qkv), expected + 1, rtol=0, atol=0)
    torch.testing.assert_close(F.scaled_dot_product_attention(*qkv), expected, rtol=0, atol=0)


def test_the_inner_handler_is_asked_first_and_proceeds_to_the_outer(qkv):
    expected = ORIGINAL(*qkv)
    with sdpa_handled_by(plus_one), sdpa_handled_by(doubled):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), (expected + 1) * 2)


def test_a_handler_may_proceed_twice_or_not_at_all(qkv):
    with sdpa_handled_by(lambda call, proceed: proceed() + proceed()):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), 2 * ORIGINAL(*qkv))
    with sdpa_handled_by(lambda call, proceed: call.value):
        assert F.scaled_dot_product_attention(*qkv) is qkv[2]


def test_calls_of_a_handler_go_to_those_around_it(qkv):
    def calls_again(call, proceed):
        return F.scaled_dot_product_attention(call.query, call.key, call.value)

    with sdpa_handled_by(plus_one), sdpa_handled_by(calls_again):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) + 1)


def test_arguments_arrive_by_name_whichever_way_they_were_given(qkv):
    seen, mask = [], torch.ones(5, 5, dtype=torch.bool)

    def look(call, proceed):
        seen.append(call)
        return proceed()

    query, key, value = qkv
    with sdpa_handled_by(look):
        by_place = F.scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.3)
        by_name = F.scaled_dot_product_attention(value=value, key=key, query=query, attn_mask=mask, scale=0.3)
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(by_place, by_name)
    assert torch.equal(by_place, ORIGINAL(query, key, value, attn_mask=mask, scale=0.3))
    assert [call[4:] for call in seen] == [(0.0, False, 0.3, False)] * 2 + [(0.0, True, None, True)]
    for call in seen:
        assert call.query is query and call.key is key and call.value is value
    assert seen[0].attn_mask is seen[1].attn_mask is mask and seen[2].attn_mask is None


@pytest.mark.parametrize("wrong", [{}, {"scael": 1.0}, {"query": None}])
def test_wrong_calls_are_refused_in_the_words_of_pytorch(qkv, wrong):
    given = () if not wrong else qkv
    with pytest.raises(TypeError) as theirs:
        ORIGINAL(*given, **wrong)
    with sdpa_handled_by(plus_one), pytest.raises(TypeError) as ours:
        F.scaled_dot_product_attention(*given, **wrong)
    assert str(ours.value) == str(theirs.value)


def test_scale_is_by_keyword_only_as_in_pytorch(qkv):
    with sdpa_handled_by(plus_one), pytest.raises(TypeError, match="positional"):
        F.scaled_dot_product_attention(*qkv, None, 0.0, False, 0.5)


def test_it_looks_like_the_original():
    with sdpa_handled_by(plus_one):
        ours = F.scaled_dot_product_attention
        assert ours is not ORIGINAL
        assert (ours.__name__, ours.__doc__, ours.__wrapped__) == (ORIGINAL.__name__, ORIGINAL.__doc__, ORIGINAL)
        with pytest.raises(ValueError):  # a builtin: it has no signature that Python knows
            inspect.signature(ORIGINAL)
        assert inspect.unwrap(ours) is ORIGINAL


def test_put_back_after_exceptions_of_the_block_the_handler_and_pytorch(qkv):
    def fails(call, proceed):
        raise KeyError("handler")

    with pytest.raises(ZeroDivisionError), sdpa_handled_by(plus_one):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is ORIGINAL
    with sdpa_handled_by(plus_one):
        with sdpa_handled_by(fails), pytest.raises(KeyError):
            F.scaled_dot_product_attention(*qkv)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(qkv[0], qkv[1][..., :3], qkv[2])
        # After each of them the block's own handler is asked as before.
        assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) + 1)


@pytest.mark.parametrize("before", [True, False])
def test_the_fast_path_is_off_meanwhile_and_as_before_afterwards(before):
    standing = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with sdpa_handled_by(plus_one):
            assert not torch.backends.mha.get_fastpath_enabled()
            with mha_handled_by(lambda need_weights, proceed: proceed()):
                assert not torch.backends.mha.get_fastpath_enabled()
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(standing)


def test_blocks_may_end_in_any_order(qkv):
    def block(handler):
        with sdpa_handled_by(handler):
            yield

    expected, first, second = ORIGINAL(*qkv), block(plus_one), block(doubled)
    next(first), next(second)
    first.close()
    assert torch.equal(F.scaled_dot_product_attention(*qkv), expected * 2)
    second.close()
    assert F.scaled_dot_product_attention is ORIGINAL


def test_the_same_handler_twice_is_asked_twice(qkv):
    with sdpa_handled_by(plus_one):
        with sdpa_handled_by(plus_one):
            assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) + 1 + 1)
        assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) + 1)


def in_thread(work):
    """The result of `work()` on another thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_other_threads_are_untouched(qkv):
    with sdpa_handled_by(plus_one):
        assert torch.equal(in_thread(lambda: F.scaled_dot_product_attention(*qkv)), ORIGINAL(*qkv))
    ends, begun, handled = threading.Event(), threading.Event(), []

    def other():
        with sdpa_handled_by(doubled):
            begun.set()
            ends.wait(60)
            handled.append(F.scaled_dot_product_attention(*qkv))

    thread = threading.Thread(target=other)
    with sdpa_handled_by(plus_one):
        thread.start()
        assert begun.wait(60)
        assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) + 1)
    # The other thread's block goes on, and this thread's calls are PyTorch's.
    assert F.scaled_dot_product_attention is not ORIGINAL
    assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv))
    ends.set()
    thread.join()
    assert torch.equal(handled[0], ORIGINAL(*qkv) * 2)


def test_a_block_may_be_ended_by_another_thread(qkv):
    blocks = ExitStack()
    blocks.enter_context(sdpa_handled_by(plus_one))
    in_thread(blocks.close)
    assert F.scaled_dot_product_attention is ORIGINAL
    with sdpa_handled_by(doubled):
        assert torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) * 2)


def test_many_threads_at_once_leave_nothing_behind(qkv):
    wrong = []

    def work():
        for _ in range(50):
            with sdpa_handled_by(plus_one):
                if not torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv) + 1):
                    wrong.append("inside")
            if not torch.equal(F.scaled_dot_product_attention(*qkv), ORIGINAL(*qkv)):
                wrong.append("outside")

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_others_put_there_meanwhile_stays(qkv):
    def theirs(*args, **kwargs):
        return below(*args, **kwargs) - 3

    expected = ORIGINAL(*qkv)
    try:
        with sdpa_handled_by(plus_one):
            below = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = theirs
            assert torch.equal(F.scaled_dot_product_attention(*qkv), expected + 1 - 3)
        assert F.scaled_dot_product_attention is theirs
        assert torch.equal(F.scaled_dot_product_attention(*qkv), expected - 3)
        with sdpa_handled_by(doubled):  # ours above theirs above ours: the handler is asked once
            assert torch.equal(F.scaled_dot_product_attention(*qkv), (expected - 3) * 2)
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = ORIGINAL


def test_the_same_function_is_put_there_each_time():
    with sdpa_handled_by(plus_one):
        first = F.scaled_dot_product_attention
    with sdpa_handled_by(doubled):
        assert F.scaled_dot_product_attention is first


class Names(TorchFunctionMode):
    def __init__(self):
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))


def test_modes_see_the_original_with_the_arguments_as_given(qkv):
    query, key, value = qkv
    with sdpa_handled_by(plus_one), Names() as mode:
        out = F.scaled_dot_product_attention(query, key, value=value, is_causal=True)
    assert (ORIGINAL, 2, ["is_causal", "value"]) in mode.seen
    assert torch.equal(out, ORIGINAL(query, key, value, is_causal=True) + 1)


class Tagged(torch.Tensor):
    """A subclass that dispatches and keeps its type."""


def test_subclasses_keep_their_type(qkv):
    query, key, value = (tensor.as_subclass(Tagged) for tensor in qkv)
    with sdpa_handled_by(lambda call, proceed: proceed()):
        out = F.scaled_dot_product_attention(query, key, value)
    assert type(out) is Tagged
    assert torch.equal(out.as_subclass(torch.Tensor), ORIGINAL(*qkv))


def test_models_are_copied_inside_as_outside(qkv):
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = F.scaled_dot_product_attention

    with sdpa_handled_by(plus_one):
        model = copy.deepcopy(Holds())
    assert torch.equal(model.attend(*qkv), ORIGINAL(*qkv))  # ours, outside of every block: it passes the call on


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_says_whether_it_forms_weights(need_weights):
    attention, x, asked = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12), []
    expected = attention(x, x, x, need_weights=need_weights)

    def look(need_weights, proceed):
        asked.append(need_weights)
        return proceed()

    calls = []
    with mha_handled_by(look), sdpa_handled_by(lambda call, proceed: calls.append(call) or proceed()):
        out = attention(x, x, x, need_weights=need_weights)
    assert asked == [need_weights]
    assert len(calls) == (0 if need_weights else 1)
    torch.testing.assert_close(out, expected)
