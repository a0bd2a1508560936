"""Correct implementations get no error: Saccade's own, PyTorch's, transformers', a third party's, those of `right/`.

A few of them are run always, all of them with `-m slow`; compiled are a few of those only.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
import transformers
import x_transformers
from right import functions, language, modules, positions
from torch import nn

import saccade
import saccade.nn as own
from saccade.models import load
from saccade.positions import AlibiConfig, RotaryConfig, T5Config
from saccade.verification import Promise, Report, checks
from saccade.verification._verify import verify

W, H = 24, 4  # width and heads
UNSCALED = Promise(scale=1.0)


@dataclass(frozen=True)
class Right:
    name: str
    make: Callable[[], Any]
    promise: Promise | None = None
    always: bool = False


def attention(**options: Any) -> own.AttentionConfig:
    return own.AttentionConfig(W, H, **options)


def block(**options: Any) -> own.BlockConfig:
    return own.BlockConfig(attention(**options), hidden=37)


SACCADE = (
    Right("attention", lambda: saccade.attention),
    Right("MultiHeadAttention", lambda: own.MultiHeadAttention(attention())),
    Right("rotary", lambda: own.MultiHeadAttention(attention(positions=RotaryConfig()))),
    Right("ALiBi", lambda: own.MultiHeadAttention(attention(positions=AlibiConfig()))),
    Right("T5", lambda: own.MultiHeadAttention(attention(positions=T5Config(8, 20), scale=1.0)), UNSCALED),
    Right("grouped heads", lambda: own.MultiHeadAttention(attention(kv_heads=2))),
    Right("normalised queries and keys", lambda: own.MultiHeadAttention(attention(qk_norm="rms"))),
    Right("sink", lambda: own.MultiHeadAttention(attention(sink=True))),
    Right("window", lambda: own.MultiHeadAttention(attention(window=saccade.Window(3, 0))), Promise(window=3)),
    Right("gate", lambda: own.MultiHeadAttention(attention(gate=True))),
    Right("softcap", lambda: own.MultiHeadAttention(attention(softcap=5.0))),
    Right("dropout", lambda: own.MultiHeadAttention(attention(dropout=0.1))),
    Right("SelfAttention", lambda: own.SelfAttention(W, H)),
    Right("Encoder", lambda: own.Encoder(block(), 2)),
    Right("Decoder", lambda: own.Decoder(block(kv_heads=2, positions=RotaryConfig()), 2)),
    Right("language model", load),
)

MASKS = {
    "causal": saccade.Causal(),
    "window": saccade.Causal() & saccade.Window(3, 0),
    "global tokens": saccade.Window(2, 2) | saccade.Global([0]),
    "strided": saccade.Strided(3) & saccade.Causal(),
    "prefix": saccade.Prefix(2),
}


PROMISED = {"window": Promise(window=3)}
# What a mask is that is neither causal nor full: the first tokens see each other, and nothing promises so.
NEITHER = {"prefix": {"causal-leak"}}


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(W, H, 37, **{"batch_first": True, **options})


def decoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(W, H, 37, **{"batch_first": True, **options})


def mha(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(W, H, **{"batch_first": True, **options})


TORCH = (
    Right("F.scaled_dot_product_attention", lambda: F.scaled_dot_product_attention, always=True),
    Right("MultiheadAttention", mha, always=True),
    Right("MultiheadAttention (length, batch, width)", lambda: mha(batch_first=False)),
    Right("MultiheadAttention without bias", lambda: mha(bias=False)),
    Right("MultiheadAttention of other widths", lambda: mha(kdim=13, vdim=17)),
    Right("MultiheadAttention with a learned key", lambda: mha(add_bias_kv=True)),
    Right("MultiheadAttention with a zero key", lambda: mha(add_zero_attn=True)),
    Right("MultiheadAttention with dropout", lambda: mha(dropout=0.1)),
    Right("TransformerEncoderLayer", encoder_layer),
    Right("TransformerEncoderLayer (length, batch, width)", lambda: encoder_layer(batch_first=False)),
    Right("TransformerEncoderLayer, pre-norm", lambda: encoder_layer(norm_first=True, activation="gelu")),
    Right("TransformerEncoderLayer without bias", lambda: encoder_layer(bias=False)),
    Right("TransformerDecoderLayer", decoder_layer),
    Right("TransformerDecoderLayer (length, batch, width)", lambda: decoder_layer(batch_first=False)),
    Right("TransformerDecoderLayer, pre-norm", lambda: decoder_layer(norm_first=True)),
    Right("TransformerEncoder", lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)),
    Right("TransformerEncoder, nested", lambda: nn.TransformerEncoder(encoder_layer(), 2)),
    Right("TransformerDecoder", lambda: nn.TransformerDecoder(decoder_layer(), 2)),
    Right("Transformer", lambda: nn.Transformer(W, H, 2, 2, 37, batch_first=True)),
)

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": 37,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
T5_SIZES = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": H}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": H, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=97, **sizes))


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5)
    return transformers.MistralForCausalLM(config)


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 37}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=4))


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_SIZES))


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=5)
    return transformers.Gemma2ForCausalLM(config)


def granite() -> nn.Module:
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, attention_multiplier=0.2))


TRANSFORMERS = (
    Right("BertModel", bert),
    Right("BertForMaskedLM", lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))),
    Right(
        "BertForSequenceClassification",
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
    ),
    Right("RobertaModel", lambda: transformers.RobertaModel(transformers.RobertaConfig(**SIZES))),
    Right("GPT2LMHeadModel", gpt2),
    Right("LlamaForCausalLM", llama),
    Right("MistralForCausalLM", mistral),
    Right("Gemma2ForCausalLM", gemma2),
    Right("GraniteForCausalLM", granite),
    Right("ViTModel", vit),
    Right("T5ForConditionalGeneration", t5),
    Right("BertSelfAttention", lambda: bert().encoder.layer[0].attention.self),
    Right("BertLayer", lambda: bert().encoder.layer[0]),
    Right("LlamaAttention", lambda: llama().model.layers[0].self_attn),
    Right("LlamaDecoderLayer", lambda: llama().model.layers[1]),
    Right("MistralAttention", lambda: mistral().model.layers[0].self_attn),
    Right("Gemma2Attention", lambda: gemma2().model.layers[0].self_attn),
    Right("ViTAttention", lambda: vit().layers[0].attention),
    Right("T5Attention", lambda: t5().encoder.block[0].layer[0].SelfAttention),
    Right("T5Block of the decoder", lambda: t5().decoder.block[0]),
)

SMALL = {"dim": W, "heads": H, "attn_dim_head": 8}
THIRD_PARTY = (
    Right("Attention", lambda: x_transformers.Attention(dim=W, heads=H, dim_head=8)),
    Right("Attention, causal", lambda: x_transformers.Attention(dim=W, heads=H, dim_head=8, causal=True)),
    Right(
        "language model",
        lambda: x_transformers.TransformerWrapper(
            num_tokens=61, max_seq_len=64, attn_layers=x_transformers.Decoder(depth=2, **SMALL)
        ),
    ),
    Right(
        "encoder of tokens",
        lambda: x_transformers.TransformerWrapper(
            num_tokens=61, max_seq_len=64, attn_layers=x_transformers.Encoder(depth=2, **SMALL)
        ),
    ),
)

PROMISES = {
    positions.T5Style: UNSCALED,
    positions.SlidingWindow: Promise(window=4),
    functions.cosine: Promise(scale=10.0),
    modules.CosineModule: Promise(scale=10.0),
}
ALWAYS = (functions.textbook, modules.NanoGPT)
# No attention of their own.
PARTS = (modules.clones, positions.rotate_half, functions.Recomputed)


def written_here(module: Any) -> list[Right]:
    found = [one for one in vars(module).values() if getattr(one, "__module__", None) == module.__name__]
    return [
        Right(one.__name__, one if inspect.isclass(one) else lambda one=one: one, PROMISES.get(one), one in ALWAYS)
        for one in found
        if one not in PARTS
    ]


HERE = tuple(itertools.chain.from_iterable(map(written_here, (functions, modules, positions, language))))
KINDS = {
    "saccade": SACCADE,
    "torch": TORCH,
    "transformers": TRANSFORMERS,
    "x-transformers": THIRD_PARTY,
    "here": HERE,
}


def parameters() -> list[Any]:
    return [
        pytest.param(one, id=f"{kind}: {one.name}", marks=() if one.always else pytest.mark.slow)
        for kind, rights in KINDS.items()
        for one in rights
    ]


def checked(target: Any, **options: Any) -> Report:
    report = verify(target, isolated=False, **options)
    assert report.ok, f"\n{report}"
    assert not harness.broken_off(report)
    assert any(outcome.status == "passed" for outcome in report.outcomes)
    return report


@pytest.fixture
def not_compiled(monkeypatch):
    """Without the check that compiles, which takes ten times as long as all others together."""
    monkeypatch.setattr(checks, "CHECKS", tuple(one for one in checks.CHECKS if one.name != "compile"))


@pytest.mark.slow
@pytest.mark.parametrize("right", parameters())
@pytest.mark.usefixtures("not_compiled")
def test_no_error(right):
    torch.manual_seed(11)
    checked(right.make(), promise=right.promise)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [x_transformers.Encoder, x_transformers.Decoder])
@pytest.mark.usefixtures("not_compiled")
def test_stacks_of_x_transformers_have_no_error_but_one_that_they_have(kind):
    """Cast to half precision and given a mask, they hand float32 to their next layer: with some versions of einx."""
    torch.manual_seed(11)
    model = kind(depth=2, **SMALL)
    report = verify(model, isolated=False)
    assert not harness.broken_off(report)
    half = model.eval().to(torch.bfloat16)
    try:
        half(torch.randn(2, 7, W, dtype=torch.bfloat16), mask=torch.ones(2, 7, dtype=torch.bool))
    except RuntimeError as error:
        (found,) = report.errors
        assert found.family == "robustness" and str(error) in found.message, f"\n{report}"
    else:
        assert report.ok, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_error_compiled(kind):
    torch.manual_seed(11)
    right = KINDS[kind][0]
    checked(right.make(), promise=right.promise, checks=["robustness"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.usefixtures("not_compiled")
def test_attention_with_any_mask_of_ours(name):
    def adapter(target, query, key, value):
        return target(query, key, value, MASKS[name])

    report = verify(saccade.attention, isolated=False, how=adapter, promise=PROMISED.get(name))
    assert not harness.broken_off(report)
    assert {finding.family for finding in report.errors} == NEITHER.get(name, set()), f"\n{report}"


def test_there_are_enough_of_them():
    assert len(HERE) >= 20
    assert sum(one.always for rights in KINDS.values() for one in rights) >= 4
