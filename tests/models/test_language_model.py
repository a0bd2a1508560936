"""The language model: what it computes, its causality, its cache, its configuration."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo.testing

import saccade
from looped import looped
from saccade.batching import pad, unpad
from saccade.models import DecoderLM, ModelConfig
from saccade.nn import KVCache
from slowly import slow_but

B, L, VOCABULARY = 2, 13, 31
CONFIG = ModelConfig(VOCABULARY, width=24, layers=2, heads=6, kv_heads=2, hidden=17, context=19)


def make(config=CONFIG) -> DecoderLM:
    return DecoderLM(config).double().eval()


def test_head_is_the_embedding():
    model = make()
    tokens = torch.randint(VOCABULARY, (B, L))
    hidden = model.decoder(model.embedding(tokens) * 24**0.5)
    torch.testing.assert_close(model(tokens), hidden @ model.embedding.weight.T)
    assert sum(p.numel() for p in model.parameters()) == model.parameter_count()


def test_attention_starts_with_logits_of_variance_near_one():
    model = make(ModelConfig(997, width=256, layers=4, heads=8))
    entering, logits = [], []
    model.decoder.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))

    def observe(layer, seen):
        logits.append(seen.query @ seen.key.transpose(-1, -2) * 32**-0.5)

    model(torch.randint(997, (5, 31)), observe=observe)
    assert entering[0].var().item() == pytest.approx(256**-0.5, rel=0.1)
    for of_layer in logits:
        assert 0.5 < of_layer.var().item() < 2.0


@pytest.mark.parametrize("width", slow_but([16, 64, 256, 1024], 16, 64, 256))
@looped("vocabulary", [2, 4, 8, 16, 67, 2048])
def test_a_fresh_model_guesses(width, vocabulary):
    """No token is likelier than another: the loss is log(vocabulary), at every width.

    A logit of variance E ** -.5 costs half of that, .125 at width 16; a token's own logit m costs
    log(1 + (e ** m - 1) / V) - m / V, .10 for the 1.5 that it rarely is with 16 tokens.
    """
    model = DecoderLM(ModelConfig(vocabulary, width=width, layers=1, heads=2, context=31)).eval()
    tokens = torch.randint(vocabulary, (16, 31))
    untied = torch.nn.Linear(width, vocabulary, bias=False)  # as in the documentation, behind embeddings of variance 1
    for logits in (model(tokens), untied(model.decoder(torch.randn(16, 31, width)))):
        loss = logits.logsumexp(-1).mean() - logits.mean()  # of tokens that anything may follow
        assert loss.item() == pytest.approx(math.log(vocabulary), abs=0.3)


def test_residual_writers_start_smaller_with_depth():
    model = DecoderLM(ModelConfig(997, width=256, layers=8, heads=4, hidden=400))
    block = model.decoder.blocks[3]
    assert block.attention.output.weight.std().item() == pytest.approx((16 * 256) ** -0.5, rel=0.03)
    assert block.feed_forward.down.weight.std().item() == pytest.approx((16 * 400) ** -0.5, rel=0.03)
    for weight in (block.attention.projection.weight, block.feed_forward.gate_up.weight):
        assert weight.std().item() == pytest.approx(256**-0.5, rel=0.03)


def test_later_tokens_have_no_gradient_at_all():
    model = make()
    embedded = []
    model.embedding.register_forward_hook(lambda module, inputs, out: embedded.append(out))
    out = model(torch.randint(VOCABULARY, (B, L)))
    for t in (0, 5, L - 1):
        (grad,) = torch.autograd.grad(out[:, t].sum(), embedded[0], retain_graph=True)
        assert (grad[:, t + 1 :] == 0).all()
        assert (grad[:, : t + 1].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("chunks", [[1] * L, [6, 1, 1, 5]])
def test_cached_decoding_is_the_parallel_forward(chunks):
    model = make()
    tokens = torch.randint(VOCABULARY, (B, L))
    cache = model.cache()
    parts = [model(chunk, cache=cache) for chunk in tokens.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens))


def test_observed_weights_are_those_attended_with():
    model = make()
    observed = []
    model(torch.randint(VOCABULARY, (B, L)), observe=lambda *arguments: observed.append(arguments))
    assert [layer for layer, *_ in observed] == [0, 1]
    for _, seen in observed:
        assert (seen.query.shape, seen.key.shape, seen.value.shape) == ((B, 6, L, 4), (B, 2, L, 4), (B, 2, L, 4))
        weights = saccade.attention_weights(seen.query, seen.key, seen.mask)
        assert (weights.triu(1) == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, 6, L, dtype=weights.dtype), atol=1e-5, rtol=0)


def test_config_round_trip():
    assert ModelConfig.from_dict(CONFIG.to_dict()) == CONFIG
    assert ModelConfig(31, 24, 2, 6).kv_heads == 6


@looped(
    ("change", "message"),
    [
        ({"heads": 5}, "heads: must divide the width, got heads=5 and width=24"),
        ({"kv_heads": 4}, "kv_heads: must divide the heads, got kv_heads=4 and heads=6"),
        ({"heads": 8, "kv_heads": 8}, "rotary positions need heads of even width, got 24 / 8 = 3"),
        ({"layers": 0}, "layers: must be at least 1, got 0"),
        ({"context": 0}, "context: must be at least 1, got 0"),
        ({"hidden": 0}, "hidden: must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout: must be in \[0, 1\), got 1.0"),
        ({"depth": 3}, r"missing nothing, unknown \['depth'\]"),
        ({"width": "24"}, "expected numbers of another type: width"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**CONFIG.to_dict(), **change})


def test_missing_fields_are_named():
    with pytest.raises(ValueError, match=r"missing \['layers', 'heads'\]"):
        ModelConfig.from_dict({"vocabulary": 31, "width": 24})


def test_bad_tokens():
    model = make()
    with pytest.raises(ValueError, match=r"tokens: expected shape \(batch, length\), got \(13,\)"):
        model(torch.zeros(L, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens: 20 are more than the model's context of 19"):
        model(torch.zeros(1, 20, dtype=torch.int64))
    cache = model.cache()
    model(torch.zeros(1, 12, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="tokens: 20 are more than the model's context of 19"):
        model(torch.zeros(1, 8, dtype=torch.int64), cache=cache)
    assert cache.length == 12


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_length_decode_as_each_alone(side):
    model, lengths = make(), (5, 3)
    prompts = [torch.randint(VOCABULARY, (n,)) for n in lengths]
    tokens, padding = pad(prompts, side=side)
    cache = model.cache()
    with torch.no_grad():
        first = unpad(model(tokens, padding=padding, cache=cache), padding)
        later = torch.randint(VOCABULARY, (2, 4))
        steps = torch.cat([model(token, cache=cache) for token in later.split(1, 1)], 1)
        for item, prompt in enumerate(prompts):
            alone = model(torch.cat((prompt, later[item]))[None])[0]
            torch.testing.assert_close(torch.cat((first[item], steps[item])), alone)
    assert cache.length.tolist() == [9, 7]
    with pytest.raises(ValueError, match="tokens: 20 are more than the model's context of 19"):
        model(torch.zeros(2, 11, dtype=torch.int64), cache=cache)


@pytest.mark.slow
def test_a_decoding_step_is_compiled_once():
    model = DecoderLM(ModelConfig(VOCABULARY, width=32, layers=2, heads=2, hidden=17, context=19)).eval()
    tokens = torch.randint(VOCABULARY, (B, 13))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        cache = KVCache.static(2, capacity=17)
        parts = [model(tokens[:, :4], cache=cache)]
        parts += [step(token, cache=cache) for token in tokens[:, 4:].split(1, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
    assert counter.frame_count == 1
