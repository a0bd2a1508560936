"""Models of transformers with attn_implementation="sdpa": as accurate as without; in training; decoding with a cache.

B batch, L length.
"""

from __future__ import annotations

import copy

import pytest
import torch

import saccade
from looped import looped

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("every_size"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

B, L, VOCABULARY = 3, 13, 53
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
COMMON = {"vocab_size": VOCABULARY, "attn_implementation": "sdpa"}


def bert():
    config = transformers.BertConfig(**SIZES, **COMMON, max_position_embeddings=32)
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2():
    config = transformers.GPT2Config(
        n_embd=24, n_layer=2, n_head=4, n_positions=64, **COMMON, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **COMMON, num_key_value_heads=2))


def mistral():
    config = transformers.MistralConfig(**SIZES, **COMMON, num_key_value_heads=2, sliding_window=5)
    return transformers.MistralForCausalLM(config)


def vit():
    config = transformers.ViTConfig(**SIZES, image_size=12, patch_size=4, attn_implementation="sdpa")
    return transformers.ViTModel(config, add_pooling_layer=False)


TEXT = {"bert": bert, "gpt2": gpt2, "llama": llama, "mistral": mistral}
DECODERS = ["gpt2", "llama", "mistral"]


def inputs(name, padded):
    if name == "vit":
        return {"pixel_values": torch.randn(B, 3, 12, 12)}, torch.ones(B, 10, dtype=torch.bool)
    mask = torch.ones(B, L, dtype=torch.long)
    if padded:
        mask[1, -5:] = 0
        if name in DECODERS:
            mask = mask.flip(1)
    return {"input_ids": torch.randint(3, VOCABULARY, (B, L)), "attention_mask": mask}, mask.bool()


def cast(given, dtype):
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}


@pytest.mark.slow
@looped("dtype", [torch.float32, torch.bfloat16])
@looped("padded", [False, True])
@looped("name", [*TEXT, "vit"])
def test_forward(name, padded, dtype):
    model = {**TEXT, "vit": vit}[name]().eval()
    given, real = inputs(name, padded)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(**cast(given, torch.float64))[0][real]
        model = model.to(dtype)
        plain = model(**cast(given, dtype))[0][real]
        with saccade.accelerate() as run:
            ours = model(**cast(given, dtype))[0][real]
    assert (run.taken, run.calls) == (2, 2), str(run)
    theirs = float((plain.double() - exact).abs().max())
    allowed = 2 * theirs + torch.finfo(dtype).eps * float(exact.abs().max())
    assert float((ours.double() - exact).abs().max()) <= allowed


@looped("name", TEXT)
def test_a_step_of_training(name):
    model = TEXT[name]().eval()
    given, real = inputs(name, padded=True)
    for parameter in model.parameters():  # of the size that trained ones have: sums of few terms, of no great range
        parameter.data.mul_(3)

    def gradients(model):
        out = model(**given)[0][real]
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found = torch.autograd.grad(out.square().mean(), [p for _, p in named], allow_unused=True)
        return {name: gradient for (name, _), gradient in zip(named, found, strict=True) if gradient is not None}

    exact, plain = gradients(copy.deepcopy(model).double()), gradients(model)
    with saccade.accelerate() as run:
        ours = gradients(model)
    assert (run.taken, run.calls) == (2, 2)
    assert ours.keys() == exact.keys() and len(ours) > 10
    largest = max(float(gradient.abs().max()) for gradient in exact.values())
    for key, judge in exact.items():
        theirs = float((plain[key].double() - judge).abs().max())
        allowed = 2 * theirs + 4 * torch.finfo(torch.float32).eps * largest
        assert float((ours[key].double() - judge).abs().max()) <= allowed, key


@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache(name):
    torch.manual_seed(2)
    model = TEXT[name]().eval()
    for parameter in model.parameters():  # random models are undecided; these prefer a token by far
        parameter.data.mul_(3)
    given, _ = inputs(name, padded=True)
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**given, **options)
    with saccade.accelerate() as run:
        found = model.generate(**given, **options)
    assert torch.equal(found, expected)
    assert (run.taken, run.calls) == (14, 14), str(run)  # 7 steps of 2 layers


def test_one_mask_is_worked_out_once_for_all_layers(monkeypatch):
    from saccade.interception._hooks import _masks

    made = []
    original = _masks._made
    monkeypatch.setattr(_masks, "_made", lambda *given: made.append(given) or original(*given))
    model = llama().eval()
    given, _ = inputs("llama", padded=True)
    with torch.no_grad(), saccade.accelerate():
        model(**given)
    assert len(made) == 1
