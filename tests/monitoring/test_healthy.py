"""Models in good health, of which none sets off an alarm, not even a note.

Shape legend: B batch, L length, E width.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import saccade
from saccade.models import DecoderLM, ModelConfig
from saccade.monitoring import Alarms, watch
from saccade.nn import AttentionConfig, BlockConfig, Decoder, Encoder
from saccade.positions import AlibiConfig, RotaryConfig
from slowly import alternate

B, L, E, H, V = 3, 41, 32, 4, 37


def alarms_of(model, run, *, times=3, gradients=True):
    """What fires while `run(model, n)` is called; where it gives something with a graph, backward too."""
    told = Alarms()
    with watch(
        model, alarms=False, gradients=gradients, on_record=told.observe, on_gradients=told.observe_gradients
    ) as watched:
        for n in range(times):
            out = run(model, n)
            if isinstance(out, torch.Tensor) and out.requires_grad:
                model.zero_grad()
                (out.float() * torch.randn_like(out.float())).sum().backward()
    assert watched.calls
    assert not watched.unobserved
    return told


def tokens(n=0, b=B, length=L):
    return torch.randint(0, V, (b, length), generator=torch.Generator().manual_seed(n))


def lengths():
    return torch.tensor([L, 29, 13])


# --- Saccade's own --------------------------------------------------------------------------------------------------


def decoder_lm(**options):
    return DecoderLM(ModelConfig(V, **{"width": E, "layers": 3, "heads": H, "hidden": 64, "context": L, **options}))


LATE = torch.arange(L) >= (L - torch.tensor([L, 29, 13]))[:, None]


def real(out, at):
    """What a loss reads: padded positions have no target."""
    return out * at[..., None]


OWN = {
    "decoder": lambda m, n: m(tokens(n)),
    "padded": lambda m, n: real(m(tokens(n), padding=saccade.Padding(lengths())), torch.arange(L) < lengths()[:, None]),
    "padded, and the loss reads it": lambda m, n: m(tokens(n), padding=saccade.Padding(lengths())),
    "padded on the left": lambda m, n: real(m(tokens(n), padding=saccade.Padding(LATE)), LATE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"dropout": 0.1}], ids=["plain", "gqa", "dropout"])
def test_decoders_that_have_just_begun(name, options):
    assert alarms_of(decoder_lm(**options).train(), OWN[name]).fired == []


def test_a_decoder_in_bf16():
    assert alarms_of(decoder_lm().bfloat16(), OWN["decoder"]).fired == []


@pytest.mark.slow
def test_a_decoder_that_generates_with_a_cache():
    model = decoder_lm(context=64)

    def generate(model, n):
        cache = model.cache()
        model(tokens(n, length=17), cache=cache)
        for step in range(40):
            model(tokens(step, length=1), cache=cache)

    with torch.no_grad():
        assert alarms_of(model, generate, times=1, gradients=False).fired == []


ATTENTIONS = {
    "rotary": AttentionConfig(E, H, positions=RotaryConfig()),
    "alibi": AttentionConfig(E, H, positions=AlibiConfig()),
    "softcap": AttentionConfig(E, H, softcap=30.0),
    "sinks": AttentionConfig(E, H, sink=True),
    "qk_norm": AttentionConfig(E, H, qk_norm="rms"),
    "window": AttentionConfig(E, H, window=saccade.Window(16, 16)),
    "scale 1": AttentionConfig(E, H, scale=1.0),
}


@pytest.mark.parametrize(("name", "kind"), alternate([*ATTENTIONS], [Encoder, Decoder]))
def test_stacks_with_every_kind_of_attention(kind, name):
    torch.manual_seed(3)
    model = kind(BlockConfig(ATTENTIONS[name], hidden=64), 3)
    assert alarms_of(model, lambda m, n: m(torch.randn(B, L, E))).fired == []


@pytest.mark.slow
def test_the_embedded_model_on_texts():
    lm = saccade.models.load()
    draw = random.Random(0)
    stories = [
        "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her dog. ",
        "The old king had three sons, and each of them wanted the golden bird that sang in the tree by the lake. ",
        "One day Tom found a red ball under the bed. He gave it to his friend, and they played until it was dark. ",
    ]

    def read(model, n):
        draw.shuffle(stories)
        ids = lm.tokenizer.encode("".join(stories * 3)).ids[:200]
        return model(torch.tensor([[lm.tokenizer.start, *ids]]))

    assert alarms_of(lm.model, read).fired == []


# --- PyTorch's ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_torch_encoders(training, padded):
    layer = nn.TransformerEncoderLayer(E, H, 64, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    ignored = torch.arange(L) >= lengths()[:, None] if padded else None

    def run(model, n):
        with torch.set_grad_enabled(training):
            return model(torch.randn(B, L, E), src_key_padding_mask=ignored)

    assert alarms_of(model, run, gradients=training).fired == []


def test_torch_cross_attention_to_long_short_and_single_contexts():
    model = nn.MultiheadAttention(E, H, batch_first=True)
    for count in (1, 2, 9, L):
        assert (
            alarms_of(model, lambda m, n, k=count: m(torch.randn(B, L, E), *[torch.randn(B, k, E)] * 2)[0]).fired == []
        )


# --- transformers ---------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 64}


def hugging(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    makers = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(vocab_size=V, **SMALL)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=V, n_positions=64, n_embd=E, n_layer=2, n_head=H)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=V, num_key_value_heads=2, **SMALL)
        ),
        "t5": lambda: transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=V, d_model=E, d_kv=8, d_ff=64, num_layers=2, num_heads=H)
        ),
    }
    return makers[name]()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_transformers_that_have_just_begun(name, padded):
    model = hugging(name).train()
    real = (torch.arange(L) < lengths()[:, None]).long() if padded else None

    def run(model, n):
        return model(input_ids=tokens(n), attention_mask=real)[0]

    assert alarms_of(model, run).fired == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_transformers_that_generate_with_a_cache(name):
    model = hugging(name).eval()

    def run(model, n):
        model.generate(tokens(n, length=11), max_new_tokens=30, do_sample=True, pad_token_id=0)

    assert alarms_of(model, run, times=1, gradients=False).fired == []


def test_a_vision_transformer():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = transformers.ViTModel(transformers.ViTConfig(image_size=28, patch_size=4, num_channels=1, **SMALL))
    assert alarms_of(model, lambda m, n: m(torch.randn(B, 1, 28, 28))[0]).fired == []


# --- that have learned ----------------------------------------------------------------------------------------------


def copying(n, length=32):
    """Random tokens and the same again: what takes a head that looks back and one that finds what came before."""
    half = torch.randint(1, V, (16, length // 2), generator=torch.Generator().manual_seed(n))
    return torch.cat([torch.zeros(16, 1, dtype=torch.int64), half, half], 1)


def sorting(n, length=24):
    """(tokens, their sorted order)."""
    drawn = torch.randint(0, V, (16, length), generator=torch.Generator().manual_seed(n))
    return drawn, drawn.sort(1).values


@pytest.mark.slow
def test_a_decoder_that_learns_to_copy(threads):
    threads(1)
    torch.manual_seed(3)
    model = decoder_lm(layers=2, context=40, hidden=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    told, losses = Alarms(), []
    how = {"alarms": False, "gradients": True}
    with watch(model, every=20, on_record=told.observe, on_gradients=told.observe_gradients, **how):
        for step in range(600):
            batch = copying(step)
            loss = F.cross_entropy(model(batch[:, :-1])[:, 17:].flatten(0, 1), batch[:, 18:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-20:]) / 20 < 0.5  # by heads as sharp as they come
    assert told.fired == []


@pytest.mark.slow
def test_a_torch_encoder_that_learns_to_sort(threads):
    threads(1)
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(E, H, 64, dropout=0.0, batch_first=True)
    parts = [nn.Embedding(V, E), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(E, V)]
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    told, losses = Alarms(), []
    with watch(
        model, every=20, alarms=False, gradients=True, on_record=told.observe, on_gradients=told.observe_gradients
    ):
        for step in range(400):
            given, ordered = sorting(step)
            loss = F.cross_entropy(model(given).flatten(0, 1), ordered.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-20:]) < 0.95 * sum(losses[:20])
    assert told.fired == []
