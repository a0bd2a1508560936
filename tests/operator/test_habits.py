"""What one writes from habit elsewhere: masks of 0 and 1 in floats, and the arguments of other libraries."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import saccade
from looped import looped
from saccade import Causal, FromTensor, Padding, variants
from saccade.nn import (
    AttentionConfig,
    BlockConfig,
    Decoder,
    EncoderBlock,
    MultiHeadAttention,
    SelfAttention,
    Transformer,
)
from saccade.operator._checks import _looks_like_a_mask

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
every_call = looped("call", CALLS.values())


@every_call
@looped("dtype", [torch.float32, torch.bfloat16])
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
@looped("dtype", [torch.float32, torch.float16, torch.bfloat16])
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
@looped("name", SCORES)
def test_scores_do_not_warn(call, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(bias=SCORES[name])


def test_nobody_looks_at_a_bias_of_vmap():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.func.vmap(lambda bias: saccade.attention(QUERY, KEY, KEY, bias=bias))(TUTORIAL[None])


FOREIGN = [
    ({"is_causal": True}, "mask=Causal()"),
    ({"is_causal": False}, "leave it out"),
    ({"score_mod": lambda score, b, h, q, k: score * 2}, "write bias=Score(score_mod).at(0)"),
    ({"block_mask": object()}, "call saccade.flex_attention"),
    ({"attn_mask": TUTORIAL.bool()}, "mask=attn_mask, True = attend"),
    ({"attn_mask": TUTORIAL}, "mask=attn_mask.bool()"),
    ({"attn_mask": TUTORIAL.long()}, "mask=attn_mask.bool()"),
    ({"dropout_p": 0.0}, "leave it out, nothing is dropped"),
    ({"attn_mask": TUTORIAL.log()}, "bias=attn_mask"),
    ({"enable_gqa": True}, "leave it out"),
    ({"causal": True}, "mask=Causal()"),
    ({"window_size": (4, 2)}, "mask=Window(4, 2), or with causal=True mask=Window(4, 0)"),
    ({"window_size": (-1, 0)}, "mask=Window(None, 0)"),
    ({"window_size": (-1, -1)}, "leave it out"),
    ({"window_size": 4}, "mask=Window(left, right)"),
    ({"softmax_scale": 0.5}, "scale="),
    ({"alibi_slopes": torch.ones(2)}, "bias=ALiBi("),
    ({"deterministic": True}, "leave it out"),
    ({"return_attn_probs": True}, "attention_weights"),
    ({"key_padding_mask": None}, "mask=Padding(~key_padding_mask)"),
    ({"attention_mask": None}, "mask=Padding(attention_mask.bool())"),
    ({"another": 1}, "unexpected keyword argument 'another'"),
]


@looped(("given", "told"), FOREIGN)
@looped("name", CALLS)
def test_arguments_of_others_are_told_what_to_write(name, given, told):
    with pytest.raises(TypeError) as error:
        CALLS[name](**given)
    message = str(error.value)
    assert message.startswith(f"{name}() got an unexpected keyword argument") and told in message
    assert repr(next(iter(given))) in message


@every_call
def test_dropout_where_there_is_none(call):
    with pytest.raises(TypeError) as error:
        call(dropout_p=0.1, causal=True)
    has_it = "dropout" in inspect.signature(getattr(saccade, str(error.value).split("(")[0])).parameters
    assert ("write dropout=" if has_it else "before dropout") in str(error.value)
    assert "mask=Causal()" in str(error.value), "each of several is told"


@looped("name", CALLS)
def test_the_signature_shows_what_is_taken(name):
    shown = inspect.signature(getattr(saccade, name)).parameters
    assert not any(one.kind is one.VAR_KEYWORD for one in shown.values())
    assert {"query", "key", "mask", "bias", "scale"} <= set(shown)


X, CONFIG = torch.zeros(1, L, 8), AttentionConfig(8, 2)
BLOCK = BlockConfig(CONFIG)
WRAPPED = {
    "SelfAttention.forward": lambda **given: SelfAttention(8)(X, **given),
    "MultiHeadAttention.forward": lambda **given: MultiHeadAttention(CONFIG)(X, **given),
    "EncoderBlock.forward": lambda **given: EncoderBlock(BLOCK)(X, **given),
    "Decoder.forward": lambda **given: Decoder(BLOCK, 1)(X, **given),
    "Transformer.forward": lambda **given: Transformer(BLOCK, 1)(X, X, **given),
    "merge": lambda **given: saccade.merge([(QUERY, QUERY[..., 0])], **given),
    "sigmoid_attention": lambda **given: variants.sigmoid_attention(QUERY, KEY, KEY, **given),
    "linear_attention": lambda **given: variants.linear_attention(QUERY, KEY, KEY, **given),
    "block_topk_attention": lambda **given: variants.block_topk_attention(
        QUERY, KEY, KEY, **given
    ),  # block= is missing
}


@looped(
    ("name", "given", "told"),
    [
        *((name, {"is_causal": True}, "write mask=Causal()") for name in WRAPPED if name[0] not in "DTm"),
        ("Decoder.forward", {"is_causal": True}, "leave it out, it is causal by itself"),
        ("Decoder.forward", {"causal": False}, "give causal=False to Decoder, when the module is made"),
        ("Transformer.forward", {"is_causal": True}, "leave it out, it is causal by itself"),
        ("MultiHeadAttention.forward", {"dropout_p": 0.0}, "a module in eval mode drops nothing"),
        ("MultiHeadAttention.forward", {"need_weights": True}, "write return_weights=True"),
        *((name, {"enable_gqa": True}, "leave it out") for name in WRAPPED),
        *((name, {"another": 1}, "argument 'another'") for name in WRAPPED),
        ("Transformer.forward", {"attn_mask": TUTORIAL.bool()}, "it takes source, target, source_mask, target_mask"),
        ("SelfAttention.forward", {"attn_mask": TUTORIAL.log()}, "it takes x, mask, return_weights"),
        ("MultiHeadAttention.forward", {"attn_mask": TUTORIAL.log()}, "write bias=attn_mask"),
        ("MultiHeadAttention.forward", {"dropout_p": 0.1}, "give dropout= to AttentionConfig"),
        ("EncoderBlock.forward", {"dropout_p": 0.1}, "give dropout= to AttentionConfig"),
        ("EncoderBlock.forward", {"softmax_scale": 0.1}, "give scale= to AttentionConfig"),
        ("merge", {"scale": 0.1}, "'scale': it takes parts"),
        ("sigmoid_attention", {"softmax_scale": 0.1}, "write scale="),
        ("sigmoid_attention", {"dropout_p": 0.1, "window_size": (4, 0)}, "'window_size': write mask=Window(4, 0)"),
        ("linear_attention", {"scale": 0.1}, "it takes query, key, value, mask, feature_map, normalise"),
    ],
)
def test_modules_and_variants_tell_it_as_well(name, given, told):
    with pytest.raises(TypeError) as error:
        WRAPPED[name](**given)
    message = str(error.value)
    assert message.startswith(f"{name}() got an unexpected keyword argument") and told in message


def test_what_wraps_is_a_piece_of_code_for_each_function():
    """PyTorch's compiler gives up on a piece of code after eight graphs."""
    wrapped = [MultiHeadAttention.forward, EncoderBlock.forward, Decoder.forward, saccade.merge]
    assert len({id(function.__code__) for function in wrapped}) == len(wrapped)
    assert saccade.merge.__code__.co_name == "merge"


def test_an_error_from_within_stays_what_it_is():
    with pytest.raises(TypeError, match="mask must be a Mask"):
        MultiHeadAttention(CONFIG)(X, mask=3, return_weights=True)


@looped("one", [SelfAttention.forward, Decoder.forward, saccade.merge, variants.sigmoid_attention])
def test_what_is_wrapped_shows_its_own_signature(one):
    shown = inspect.signature(one).parameters
    assert not any(each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) for each in shown.values())


@pytest.mark.parametrize(
    "other", [torch._neg_view(torch.eye(4)), torch.eye(4).to(torch.float8_e4m3fn)], ids=["negative view", "float8"]
)
def test_a_bias_that_numpy_cannot_read_is_not_looked_at(other):
    assert not _looks_like_a_mask(other)


def test_a_module_warns_at_the_line_that_calls_it():
    module = saccade.nn.MultiHeadAttention(saccade.nn.AttentionConfig(16, 2))
    with pytest.warns(UserWarning, match="0 and 1") as caught:
        module(torch.randn(1, 4, 16), bias=torch.ones(4, 4).tril())
    assert [warning.filename for warning in caught] == [__file__]


def test_a_bias_of_a_wrong_dtype_is_an_error_and_no_warning(recwarn):
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="bias is torch.float64"):
        saccade.attention(x, x, x, bias=torch.ones(4, 4, dtype=torch.float64).tril())
    assert not recwarn.list


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_weights_refuse_a_strided_nested_tensor():
    nested = torch.nested.nested_tensor([torch.randn(2, 6, 8), torch.randn(2, 3, 8)])  # strided
    with pytest.raises(TypeError, match="query must be a dense tensor"):
        saccade.attention_weights(nested, nested)
