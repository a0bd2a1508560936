"""Steps of transformers' decoders by native calls: the same logits, and the modules as soon as anybody looks inside."""

from __future__ import annotations

import weakref

import pytest
import torch

import saccade
from saccade.acceleration import _ahead, _decoder_layers
from saccade.operator._backends.native import _kernels
from saccade.operator.nn._rounded import Rounding
from slowly import diagonal, slow_after, slow_but

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(_kernels.module is None, reason="no native kernels")

SIZES = dict(hidden_size=192, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=250)
OPT = dict(ffn_dim=250, word_embed_proj_dim=192)
MORE = dict(vocab_size=211, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None)
KINDS = {
    "Llama": dict(attention_bias=True, mlp_bias=True),
    "Mistral": dict(sliding_window=7),
    "Qwen3": dict(head_dim=64),
    "GPT2": dict(n_positions=64),
    "OPT": OPT,
    "Phi": dict(partial_rotary_factor=0.5),
    "Phi3": dict(),
    "GPTNeoX": dict(),
    "GPTNeoX, one after the other": dict(use_parallel_residual=False),
    "Starcoder2": dict(sliding_window=None),
    "Gemma3Text": dict(sliding_window=7, head_dim=64, query_pre_attn_scalar=64),
}
NEW = 15


@pytest.fixture(autouse=True)
def seldom_proved(monkeypatch):
    """The random calls at which a proof is repeated would be missing in the counts."""
    monkeypatch.setattr(_decoder_layers, "next_proof", lambda: 10**6)


def model_of(kind, **options):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if not (kind == "GPTNeoX" and name == "num_key_value_heads")}
    config = getattr(transformers, f"{kind}Config")(**sizes | MORE | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def logits(model, **options):
    """Of `NEW` tokens after two prompts of 9 and 5 tokens, (B, NEW, V)."""
    ids = torch.randint(1, 211, (2, 9), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(ids)
    ids[1, :4] = real[1, :4] = 0
    asked = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    out = model.generate(ids, attention_mask=real, output_logits=True, **asked, **options)
    return torch.stack(out.logits, 1)


def close(got, want):
    """float32 through two layers of sums of at most 250 terms."""
    assert torch.allclose(got, want, atol=250 * 2.0**-23 * want.abs().max().item())


@pytest.mark.parametrize("kind", slow_but(KINDS, "Llama", "GPT2", "GPTNeoX", "Phi", "Gemma3Text"))
def test_tokens_and_logits_are_the_model_s(kind):
    """Prompts that are padded on the left, past a window of 7; beams, which reorder the cache."""
    model = model_of(kind.split(",")[0], **KINDS[kind])
    want, beams = logits(model), logits(model, num_beams=2)
    with saccade.accelerate(model) as run:
        close(logits(model), want)
        assert run.backends["native"] == 2 * (NEW - 2)  # the prompt by modules; the first step to compare
        close(logits(model, num_beams=2), beams)
    assert "decoder layer" not in str(saccade.accelerate(model))
    close(logits(model), want)


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_layers_that_hold_few_bits_step_natively(form):
    """A byte of an activation may fall to the other side: one step of 255."""
    model = model_of("Llama")
    Rounding(model, form).round_all()
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, -1:]))
    seen = []
    logits(model)
    want, seen = torch.cat(seen, 1), []
    with saccade.accelerate(model) as run:
        logits(model)
        assert run.backends["native"] >= 2 * (NEW - 2)
    got = torch.cat(seen, 1)
    assert torch.allclose(got[:, :2], want[:, :2], atol=want.abs().max().item() / 255)


def test_what_computes_otherwise_is_not_believed():
    """Ernie turns neighbouring features: its modules have the same names."""
    model = model_of("Ernie4_5")
    want = logits(model)
    with saccade.accelerate(model) as run:
        close(logits(model), want)
        assert not run.backends["native"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_first_token_without_a_prompt_and_padding_in_inference_mode(mode):
    model = model_of("Llama")
    ids, real = torch.randint(1, 211, (2, 8), generator=torch.Generator().manual_seed(1)), torch.ones(2, 8).long()
    real[1, :3] = 0

    def run():
        alone, padded = transformers.DynamicCache(), transformers.DynamicCache()  # whose layers come with their tokens
        out = [model(ids[:, n : n + 1], past_key_values=alone).logits for n in range(8)]
        out += [model(ids[:, :5], attention_mask=real[:, :5], past_key_values=padded).logits[:, -1:]]
        out += [
            model(ids[:, n : n + 1], attention_mask=real[:, : n + 1], past_key_values=padded).logits
            for n in range(5, 8)
        ]
        return torch.cat(out, 1)

    with mode():
        want = run()
        with saccade.accelerate(model) as accelerated:
            close(run(), want)
        assert accelerated.backends["native"] >= 2 * (6 + 3)


def test_proofs_that_are_repeated_leave_the_cache_as_it_is(monkeypatch):
    monkeypatch.setattr(_decoder_layers, "next_proof", lambda: 1)
    model = model_of("Mistral", sliding_window=7)
    want = logits(model)
    with saccade.accelerate(model) as run:
        close(logits(model), want)
        assert run.backends["native"] == 2 * 7  # every second step


class Steps:
    """A model that decodes token by token, beside what its modules give for the whole text without a cache."""

    def __init__(self, kind="Llama", **options):
        self.model = model_of(kind, **options)
        self.ids = torch.randint(1, 211, (2, 30), generator=torch.Generator().manual_seed(1))
        self.at, self.cache = 5, transformers.DynamicCache(config=self.model.config)
        self.model(self.ids[:, :5], past_key_values=self.cache)

    def agrees(self):
        got = self.model(self.ids[:, self.at : self.at + 1], past_key_values=self.cache).logits[:, -1]
        self.at += 1
        close(got, self.model(self.ids[:, : self.at], use_cache=False).logits[:, -1])


class Adapted(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


# Each with how many of the two layers are computed natively afterwards.
CHANGES = {
    "a write": (lambda layer: layer.mlp.down_proj.weight.mul_(1.5), 2),
    "a write that is not counted": (lambda layer: layer.mlp.up_proj.weight.data.mul_(1.5), 2),
    "other memory": (lambda layer: setattr(layer.mlp.up_proj.weight, "data", layer.mlp.up_proj.weight.data * 1.5), 2),
    "the same memory, turned": (
        lambda layer: setattr(layer.self_attn.o_proj.weight, "data", layer.self_attn.o_proj.weight.data.t()),
        1,
    ),
    "an eps": (lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5), 2),
    "another parameter": (
        lambda layer: setattr(layer.input_layernorm, "weight", torch.nn.Parameter(torch.randn(192))),
        2,
    ),
    "a number": (lambda layer: setattr(layer, "residual_multiplier", 0.5), 1),
    "a hook": (lambda layer: layer.mlp.register_forward_hook(lambda module, args, out: 3 * out), 1),
    "a hook for all": (lambda layer: None, 0),
    "an adapter": (lambda layer: setattr(layer.self_attn, "v_proj", Adapted(layer.self_attn.v_proj)), 1),
    "a forward": (lambda layer: setattr(layer.self_attn, "forward", scaled(layer.self_attn.forward)), 1),
}


def scaled(forward):
    def other(*args, **kwargs):
        out, weights = forward(*args, **kwargs)
        return 2 * out, weights

    return other


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_two_tokens_are_seen(name):
    change, native = CHANGES[name]
    steps = Steps("Granite")
    with saccade.accelerate(steps.model) as run:
        for _ in range(3):
            steps.agrees()
        assert run.backends["native"] == 2 * 2
        change(steps.model.model.layers[1])
        hook = None
        if name == "a hook for all":
            hook = torch.nn.modules.module.register_module_forward_hook(
                lambda module, args, out: 2 * out if isinstance(module, torch.nn.SiLU | torch.nn.Linear) else None
            )
        steps.cache = transformers.DynamicCache(config=steps.model.config)
        steps.model(steps.ids[:, : steps.at], past_key_values=steps.cache)
        steps.agrees()
        taken = run.backends["native"]
        steps.agrees()
        if hook is not None:
            hook.remove()
        assert run.backends["native"] == taken + native


@torch.no_grad()
def test_a_bias_whose_copy_is_read_is_read_anew():
    """A projection by heads is read from a copy in another order, its bias, too."""
    steps = Steps("GPTNeoX")
    bias = steps.model.gpt_neox.layers[1].attention.query_key_value.bias
    with saccade.accelerate(steps.model) as run:
        for edit in (lambda: None, lambda: None, lambda: bias.add_(1), lambda: bias.data.mul_(2)):
            edit()
            steps.cache = transformers.DynamicCache(config=steps.model.config)
            steps.model(steps.ids[:, : steps.at], past_key_values=steps.cache)
            steps.agrees()
            steps.agrees()
        assert run.backends["native"] >= 2 * 6


@torch.no_grad()
def test_layers_that_step_together_give_the_bits_of_one_by_one(monkeypatch):
    """Between layers numbers are rounded to bfloat16, though they stay in the kernel."""
    model = model_of("Mistral", num_hidden_layers=3).bfloat16()
    with saccade.accelerate(model):
        logits(model)  # in which the modules compute a step for the proof
        together = logits(model)
        monkeypatch.setattr(_ahead, "called_by_its_model", lambda: False)
        assert torch.equal(logits(model), together)


# A model's own loop over its layers, with what may happen behind the first one. Other loops compute nothing ahead.
LOOP = """
def run(layers, x, waves, others, cache, between):
    for place, layer in enumerate(layers):
        x = layer(x, position_embeddings=others if place == 1 else waves, past_key_values=cache, attention_mask=None)
        if place == 0 and between is not None:
            x = between(x, cache, layers)
            if x is None:
                return None
    return x
"""
WITHIN = {"__name__": "transformers.models.tried"}
exec(LOOP, WITHIN)
ELSEWHERE = {"__name__": "of_a_user"}
exec(LOOP, ELSEWHERE)


def changed(change):
    """A change of the layers or the cache that leaves the hidden state as it is."""

    def between(x, cache, layers):
        change(cache, layers)
        return x

    return between


def write(cache, layers):
    layers[1].mlp.down_proj.weight.mul_(1.5)


BETWEEN = {
    "nothing": (WITHIN, None),
    "a write": (WITHIN, lambda x, *rest: x.mul_(0.5)),
    "a write that is not counted": (WITHIN, lambda x, *rest: (x.data.mul_(0.5), x)[1]),
    "another input": (WITHIN, lambda x, *rest: 0.5 * x),
    "other values": (
        WITHIN,
        changed(lambda cache, layers: setattr(cache.layers[1], "values", 2 * cache.layers[1].values)),
    ),
    "the end": (WITHIN, lambda x, *rest: None),
    "other positions": (WITHIN, None),
    "other weights, in a loop that is not the model's": (ELSEWHERE, changed(write)),
}


@pytest.mark.parametrize(("mode", "name"), diagonal([torch.no_grad, torch.inference_mode], [*BETWEEN]))
def test_steps_ahead_are_used_only_for_what_they_were_computed_for(name, mode, monkeypatch):
    model, calls = model_of("Llama", num_hidden_layers=3), []
    weights = model.state_dict()["model.layers.1.mlp.down_proj.weight"]
    original, rotary = weights.clone(), model.model.rotary_emb
    tokens = torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(1))
    loop, between = BETWEEN[name]

    def run():
        cache, found = transformers.DynamicCache(), []
        weights.copy_(original)
        for n in range(16):
            x, now = tokens[:, n : n + 1].clone(), n % 4 == 3
            waves, others = (rotary(x, torch.full((1, 1), n + place)) for place in (0, 1))
            others = others if now and name == "other positions" else waves
            out = loop["run"](model.model.layers, x, waves, others, cache, between if now else None)
            found += [] if out is None else [out]
        return torch.cat(found, 1)

    native = _decoder_layers.run
    monkeypatch.setattr(_decoder_layers, "run", lambda *args: calls.append(len(args[2])) or native(*args))
    monkeypatch.setattr(_decoder_layers, "_APART", 1)
    with mode():
        want = run()
        with saccade.accelerate(model) as accelerated:
            close(run(), want)
            assert accelerated.backends["native"] > 30
    assert (calls.count(2) + calls.count(3) >= 3) == (loop is WITHIN)  # who missed a token holds fewer


@torch.no_grad()
def test_a_hook_that_changes_the_next_layer_is_seen_at_once():
    steps = Steps("Llama")
    with saccade.accelerate(steps.model):
        for _ in range(6):
            steps.agrees()
        first, second = steps.model.model.layers
        first.register_forward_hook(lambda module, args, out: (second.mlp.down_proj.weight.copy_(other), out)[1])
        other = torch.randn_like(second.mlp.down_proj.weight)
        steps.cache = transformers.DynamicCache(config=steps.model.config)
        steps.model(steps.ids[:, : steps.at - 1], past_key_values=steps.cache)
        second.mlp.down_proj.weight.zero_()
        steps.at -= 1
        steps.agrees()


@torch.no_grad()
def test_outputs_that_transformers_captures_come_from_the_modules_and_no_others():
    """Its hooks stay behind on the layers and their attention."""
    steps = Steps("Llama")
    with saccade.accelerate(steps.model) as run:
        for asked in ({}, dict(output_hidden_states=True), dict(output_attentions=True), {}):
            for _ in range(4):
                steps.agrees()
            taken = run.backends["native"]
            out = steps.model(steps.ids[:, steps.at : steps.at + 1], past_key_values=steps.cache, **asked)
            assert (run.backends["native"] == taken + 2) == (not asked)
            steps.at += 1
            want = steps.model(steps.ids[:, : steps.at], use_cache=False, **asked)
            for got, whole in zip(out.hidden_states or (), want.hidden_states or (), strict=True):
                close(got, whole[:, -1:])
            assert (out.attentions is None) == ("output_attentions" not in asked)


@torch.no_grad()
def test_a_layer_that_is_left_out_gives_its_step_to_no_other():
    model = model_of("Llama", num_hidden_layers=3)
    ids, layers = torch.randint(1, 211, (1, 9)), model.model.layers
    with saccade.accelerate(model):
        cache = transformers.DynamicCache(config=model.config)
        for token in ids[:, :6].split(1, 1):
            model(token, past_key_values=cache)
        model.model.layers = torch.nn.ModuleList([layers[0], layers[2]])
        got = model(ids[:, 6:7], past_key_values=cache).logits
    cache, model.model.layers = transformers.DynamicCache(), layers
    model(ids[:, :6], past_key_values=cache)
    model.model.layers = torch.nn.ModuleList([layers[0], layers[2]])
    close(got, model(ids[:, 6:7], past_key_values=cache).logits)


@torch.no_grad()
def test_no_cache_and_no_copy_of_weights_outlives_its_use():
    model = model_of("Llama", num_hidden_layers=3)
    Rounding(model, "int4").round_all()
    ids = torch.randint(1, 211, (1, 9))
    with saccade.accelerate(model) as run:
        cache = transformers.DynamicCache(config=model.config)
        for token in ids.split(1, 1):
            model(token, past_key_values=cache)
        kept = weakref.ref(cache), weakref.ref(cache.layers[0].keys)
        model.config.num_hidden_layers = 2  # an early end of the last forward
        model(ids[:, :1], past_key_values=cache)
        del cache
        assert kept[0]() is None and kept[1]() is None
        layers = [layer for layer in run._model.layers if isinstance(layer, _decoder_layers.DecoderLayer)]
        dense = [x for layer in layers if layer._read for x in layer._read[0]._tensors if x.dtype == torch.float32]
        assert all(isinstance(x, torch.nn.Parameter) for x in dense)


@torch.no_grad()
def test_a_cache_that_others_change_is_read_anew():
    steps = Steps()
    with saccade.accelerate(steps.model) as run:
        for change in (
            lambda cache: None,
            lambda cache: cache.crop(-3),
            lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
            lambda cache: setattr(cache.layers[0], "values", cache.layers[0].values.clone()),
        ):
            for _ in range(3):
                steps.agrees()
            held = steps.cache.layers[0].keys, steps.cache.layers[0].keys.clone()
            change(steps.cache)
            if steps.cache.get_seq_length() < steps.at:
                steps.at -= 3
            if change.__code__.co_names[:1] == ("reorder_cache",):
                steps.ids = steps.ids.flip(0)
            steps.agrees()
            assert torch.equal(*held)  # what was handed out stays
        assert run.backends["native"] > 20


@torch.no_grad()
@pytest.mark.parametrize("kind", slow_after(2, ["Llama", "Gemma3Text", "GPTNeoX"]))
def test_a_watch_sees_the_calls_of_the_modules(kind):
    """A watch from the first step on, so that proofs are made beside it, over padded prompts and a window."""
    model = model_of(kind, **KINDS[kind])
    with saccade.watch(model) as plain:
        want = logits(model)
    with saccade.accelerate(model) as run, saccade.watch(model) as seen:
        close(logits(model), want)
        assert run.backends["native"] == 2 * (NEW - 2)
    assert seen.calls == plain.calls and seen.steps == plain.steps and not seen.unobserved
    for name, heads in plain.aggregates.items():
        for head, statistics in heads.items():
            for statistic, aggregate in statistics.items():
                got = seen.aggregates[name][head][statistic]
                assert got.count == aggregate.count, (name, statistic)
                pairs = (getattr(got, end) - getattr(aggregate, end) for end in ("mean", "min", "max"))
                assert max(map(abs, pairs)) <= 250 * 2.0**-20 * max(1, abs(aggregate.mean)), (name, statistic)


@torch.no_grad()
def test_whoever_differentiates_or_asks_for_weights_gets_the_modules():
    steps = Steps()
    with saccade.accelerate(steps.model) as run:
        for _ in range(3):
            steps.agrees()
        taken = run.backends["native"]
        with torch.enable_grad():
            steps.model(steps.ids[:, 9:10], past_key_values=steps.cache).logits.sum().backward()
        steps.model.config._attn_implementation = "eager"
        steps.model(steps.ids[:, 10:11], past_key_values=steps.cache)
        assert run.backends["native"] == taken


@torch.no_grad()
def test_padding_is_left_out_of_layers_that_hold_few_bits():
    torch.manual_seed(0)
    sizes = dict(vocab_size=211, hidden_size=192, num_hidden_layers=2, num_attention_heads=6, intermediate_size=250)
    model = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()
    Rounding(model, "int8").round_all()
    ids, real = torch.randint(211, (3, 40)), torch.ones(3, 40).long()
    real[1, 9:] = real[2, 20:] = 0
    want = model(ids, attention_mask=real)[0][real.bool()]
    with saccade.accelerate(model) as run:
        model(ids, attention_mask=real)
        got = model(ids, attention_mask=real)[0]
        assert "2  layer without padding\n" in f"{run}\n"
    assert not got[1, 9:].any()
    assert torch.allclose(got[real.bool()], want, atol=want.abs().max().item() / 255)
