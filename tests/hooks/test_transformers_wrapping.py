"""A wrapper around every attention function a model is handed: on this thread, while it lasts, and then no more."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from integrations.transformers.families import BY_NAME, batch, make
from saccade.interception._hooks.transformers import functions_wrapped_by


@pytest.fixture(autouse=True)
def restored():
    before = dict(vars(AttentionInterface))
    yield
    assert dict(vars(AttentionInterface)) == before


def counting(calls, name="call"):
    def wrap(function):
        def counted(*args, **more):
            calls.append(name)
            return function(*args, **more)

        return counted

    return wrap


@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_every_layer_is_seen_and_nothing_changes(how):
    family, calls = BY_NAME["llama"], []
    model, given = make(family, how), batch(family)
    plain = model(**given).logits
    with functions_wrapped_by(counting(calls)):
        wrapped = model(**given).logits
    assert len(calls) == 2 and torch.equal(plain, wrapped)
    model(**given)
    assert len(calls) == 2


def test_wrappers_nest_and_the_inner_with_is_called_first():
    calls = []
    family = BY_NAME["bert"]
    with functions_wrapped_by(counting(calls, "outer")), functions_wrapped_by(counting(calls, "inner")):
        make(family, "eager")(**batch(family))
    assert calls == ["inner", "outer"] * 2


def test_an_inner_wrapper_ends_with_its_with():
    calls = []
    with functions_wrapped_by(counting(calls, "outer")):
        with pytest.raises(RuntimeError), functions_wrapped_by(counting(calls, "inner")):
            raise RuntimeError
        make(BY_NAME["bert"], "eager")(**batch(BY_NAME["bert"]))
    assert calls == ["outer"] * 2


def test_blocks_may_end_in_any_order():
    calls = []
    outer, inner = functions_wrapped_by(counting(calls, "outer")), functions_wrapped_by(counting(calls, "inner"))
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    model, given = make(BY_NAME["bert"], "eager"), batch(BY_NAME["bert"])
    model(**given)
    assert calls == ["inner"] * 2
    inner.__exit__(None, None, None)
    with functions_wrapped_by(lambda function: function):
        model(**given)
    assert calls == ["inner"] * 2


def test_a_block_that_ends_on_another_thread_is_over_on_its_own():
    calls = []
    block = functions_wrapped_by(counting(calls))
    block.__enter__()
    other = threading.Thread(target=block.__exit__, args=(None, None, None))
    other.start()
    other.join()
    with functions_wrapped_by(lambda function: function):
        make(BY_NAME["bert"], "eager")(**batch(BY_NAME["bert"]))
    assert not calls


def test_other_threads_are_not_touched():
    family, calls, seen = BY_NAME["bert"], [], []
    model, given = make(family, "eager"), batch(family)
    with functions_wrapped_by(counting(calls)):
        other = threading.Thread(target=lambda: seen.append(model(**given).logits))
        other.start()
        other.join()
        assert not calls and len(seen) == 1
        model(**given)
        assert len(calls) == 2


def test_two_threads_at_once_and_the_last_one_restores():
    family = BY_NAME["bert"]
    model, given = make(family, "eager"), batch(family)
    inside, leave, counts = threading.Event(), threading.Event(), {"a": [], "b": []}

    def first():
        with functions_wrapped_by(counting(counts["a"])):
            inside.set()
            leave.wait(20)
            model(**given)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(20)
    with functions_wrapped_by(counting(counts["b"])):
        model(**given)
    leave.set()
    thread.join()
    assert (len(counts["a"]), len(counts["b"])) == (2, 2)


def test_restored_after_an_exception():
    with pytest.raises(RuntimeError, match="inside"), functions_wrapped_by(lambda function: function):
        raise RuntimeError("inside")
    calls = []
    with functions_wrapped_by(counting(calls)):
        pass
    make(BY_NAME["bert"], "eager")(**batch(BY_NAME["bert"]))
    assert not calls


def test_functions_taken_from_the_mapping_are_wrapped_once():
    calls = []
    with functions_wrapped_by(counting(calls)):
        by_item = ALL_ATTENTION_FUNCTIONS["sdpa"]
        by_name = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        for function in (by_item, by_name):
            query = torch.randn(1, 3, 5, 7)
            function(torch.nn.Module(), query, query, query, None)
    assert len(calls) == 2
    assert ALL_ATTENTION_FUNCTIONS["sdpa"].__name__ == "sdpa_attention_forward"


def test_an_unknown_name_is_transformers_own_error():
    with functions_wrapped_by(lambda function: function), pytest.raises(KeyError, match="not a valid attention"):
        ALL_ATTENTION_FUNCTIONS.get_interface("nonsense", None)
