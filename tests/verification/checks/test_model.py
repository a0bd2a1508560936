"""Whole models: each part of the check is silent on right ones and names one fault each, planted in a small model."""

from __future__ import annotations

import math

import harness
import pytest
import torch
import transformers
from right.language import TinyBert, TinyGPT, TinyTranslator
from torch import nn
from wrong.fault import HF_DECODER, HF_ENCODER, HF_SEQ2SEQ

import saccade
from saccade.models import load
from saccade.verification.checks._model import CHECK
from saccade.verification.findings._finding import Inapplicable, Undecided
from saccade.verification.subject._families import promised
from saccade.verification.subject._layers import layer_subject
from saccade.verification.subject._models import takes_tokens, token_subject
from saccade.verification.subject._reading import Promise
from saccade.verification.subject._token_models import EncoderDecoderModel, PatchModel, WithTargets

WORDS, WIDTH, HEADS, LONGEST = 53, 20, 5, 31
LATER = "a later token changes an earlier output"


class Attention(nn.Module):
    """With a switch for each way to be wrong."""

    def __init__(self, causal, fault):
        super().__init__()
        self.causal, self.fault = causal, fault
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, real, past):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        m = k.shape[2]
        seen = torch.ones(n, m, dtype=torch.bool)
        if self.causal:
            seen = seen.tril(m - n + (self.fault == "next"))
        if self.fault == "last" and n == m:
            seen[-2, -1] = True
        if self.fault == "nothing":
            seen = torch.eye(m, dtype=torch.bool)[m - n :]
        if self.fault == "strict":
            seen = seen.tril(m - n - 1) | (torch.arange(m) == 0)
        if real is not None and self.fault != "deaf":
            seen = seen & real[:, None, None, :].bool()
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.fault == "batch":
            scores = scores + 0.1 * scores.mean(0, keepdim=True)
        fill = -2.0 if self.fault == "faint" else torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~seen, fill).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, -1)), (k, v)


class Tiny(transformers.PreTrainedModel):
    """A decoder or an encoder in the manner of transformers' models."""

    config_class = transformers.PretrainedConfig

    def __init__(self, causal=True, fault=None):
        super().__init__(transformers.PretrainedConfig(vocab_size=WORDS, max_position_embeddings=LONGEST))
        torch.manual_seed(5)
        self.fault = fault
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Attention(causal, fault) for _ in range(2))
        for layer in self.layers:
            layer.is_causal = causal
        self.head = nn.Linear(WIDTH, WORDS)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False):
        start = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        start = 0 if self.fault == "positions" else start
        if position_ids is None:
            position_ids = torch.arange(start, start + input_ids.shape[1])[None]
        if self.fault == "told":
            position_ids = position_ids * 0 + torch.arange(start, start + input_ids.shape[1])
        x, kept = self.words(input_ids) + self.places(position_ids), []
        for at, layer in enumerate(self.layers):
            past = None if past_key_values is None else past_key_values[at]
            hidden = layer.fault == "second" and at == 1
            more, cache = layer(x, None if hidden else attention_mask, past)
            x, kept = x + more, [*kept, cache]
        if self.fault == "mean":
            x = x - x.mean(1, keepdim=True)
        if self.fault == "window" and past_key_values is not None:
            kept = [(k[:, :, -4:], v[:, :, -4:]) for k, v in kept]
        kept = tuple(kept) if use_cache else None
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.head(x), past_key_values=kept)


def findings(target, promise=None):
    return list(CHECK.run(token_subject(target, promise)))


def only(target, promise=None):
    (found,) = [finding for finding in findings(target, promise) if finding.severity == "error"]
    assert found.family == "model"
    assert found.fix and found.effect
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_a_right_model_is_left_in_peace(causal):
    assert findings(Tiny(causal)) == []


def test_a_decoder_that_sees_the_next_token():
    found = only(Tiny(fault="next"))
    assert "token 1 of 2 changes output 0 by" in found.message
    assert (found.evidence["query"], found.evidence["key"], found.evidence["probe"]) == (0, 1, "causality")


def test_a_decoder_of_which_only_the_last_but_one_leaks():
    assert LATER in only(Tiny(fault="last")).message


def test_a_mask_that_is_too_faint_leaks():
    assert LATER in only(Tiny(fault="faint")).message


def test_a_mean_over_the_sequence_leaks():
    assert LATER in only(Tiny(fault="mean"), Promise(causal=True)).message


def test_attention_that_sees_nothing_but_itself():
    assert "each query sees its own key alone" in only(Tiny(fault="nothing")).message


def test_an_encoder_that_is_causal():
    model = Tiny(causal=True)
    assert "sees no later key, though the model is to be bidirectional" in only(model, Promise(causal=False)).message


def test_batch_items_that_meet():
    found = only(Tiny(fault="batch"))
    assert "rows of the batch reach each other" in found.message
    assert len(found.example) == 2


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_padding_that_is_not_hidden(causal):
    found = only(Tiny(causal=causal, fault="deaf"))
    side = "left" if causal else "right"
    assert f"It changes with the content of the padding on the {side}" in found.message


@pytest.mark.slow
def test_padding_that_one_layer_forgets():
    model = Tiny(causal=False)
    model.layers[1].fault = "second"
    assert "It changes with the content of the padding on the right" in only(model).message


def test_position_ids_that_are_ignored():
    assert "Padding on the left moves it, whatever the padding holds: its positions" in only(Tiny(fault="told")).message


def test_a_cache_that_starts_counting_again():
    found = only(Tiny(fault="positions"))
    assert found.message.startswith("Decoding with its own cache differs from reading the same tokens at once")
    assert found.evidence["step"] == 4  # the first behind a prompt of 3


def test_a_cache_that_forgets():
    found = only(Tiny(fault="window"))
    # keys 0 to 3 are kept by the first call that drops any, so the fifth token's output is the last right one
    assert found.evidence["step"] == 6


def test_plain_models_are_read_by_what_they_do():
    torch.manual_seed(2)
    gpt, encoder, pair = token_subject(TinyGPT()), token_subject(TinyBert()), token_subject(TinyTranslator())
    assert isinstance(gpt.target, WithTargets)
    assert gpt.reading.vocabulary == 61
    assert encoder.reading.masks[0].argument == "attention_mask"
    assert isinstance(pair.target, EncoderDecoderModel)
    assert pair.promise.causal is True
    for subject in (gpt, encoder, pair):
        assert [finding for finding in CHECK.run(subject) if finding.severity == "error"] == []


def broken_translator(change):
    torch.manual_seed(2)
    model = TinyTranslator().eval()
    change(model)
    return model


class Unread(nn.Module):
    def forward(self, query, key, value, mask=None):
        return torch.zeros_like(query)


class Deaf(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, query, key, value, mask=None):
        return self.attention(query, key, value)


class OtherItems(Deaf):
    def forward(self, query, key, value, mask=None):
        return self.attention(query, key.roll(1, 0), value.roll(1, 0), None if mask is None else mask.roll(1, 0))


def test_a_source_that_is_never_read():
    model = broken_translator(lambda model: model.read.__init__([Unread(), Unread()]))
    assert "does not depend on source token 0" in only(model).message


def test_a_source_of_another_item():
    def change(model):
        model.read = nn.ModuleList(OtherItems(one) for one in model.read)

    assert "of row 2 changes by" in only(broken_translator(change)).message


@pytest.mark.slow
def test_an_encoder_that_cannot_be_called_alone_is_seen_by_what_the_model_returns():
    triangle = "source & torch.ones(2 * source.shape[-1:], dtype=torch.bool).tril()"
    wrong = HF_SEQ2SEQ.source.replace("layer(memory, source)", f"layer(memory, {triangle})")
    for source in (HF_SEQ2SEQ.source, wrong):
        with harness.loaded(source, "seq2seq") as names:
            model = harness.made(names, HF_SEQ2SEQ.target)
            assert model.get_encoder() is model
            if source is wrong:
                assert "The encoder is causal: of its 6 outputs" in only(model).message
            else:
                assert not [finding for finding in findings(model) if finding.severity == "error"]


def test_a_sources_padding_that_cross_attention_reads():
    def change(model):
        model.read = nn.ModuleList(Deaf(one) for one in model.read)

    assert "tokens of padding behind its source" in only(broken_translator(change)).message


class PyTorchs(nn.Module):
    """nn.Transformer between an embedding and a head; its masks are True where the source is padding."""

    def __init__(self, hides):
        super().__init__()
        self.tokens, self.head, self.hides = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), hides
        self.transformer = nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, 0.0, batch_first=True)

    def forward(self, src, tgt, src_key_padding_mask=None):
        later = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool, device=tgt.device).triu(1)
        out = self.transformer(
            self.tokens(src),
            self.tokens(tgt),
            tgt_mask=later,
            src_key_padding_mask=src_key_padding_mask,
            memory_key_padding_mask=src_key_padding_mask if self.hides else None,
        )
        return self.head(out)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_padding_mask_of_a_source_as_pytorch_means_it():
    assert [finding for finding in findings(PyTorchs(hides=True)) if finding.severity == "error"] == []
    assert "tokens of padding behind its source" in only(PyTorchs(hides=False)).message


@pytest.mark.slow
def test_saccades_own_language_model():
    assert findings(load()) == []


def vit(**more):
    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 37}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=12, patch_size=4, **more)).eval()


def test_a_vision_model_is_read_from_its_patches_on():
    model = vit()
    subject = token_subject(model)
    assert isinstance(subject.target, PatchModel)
    images = subject.target.pixels(2)
    with torch.no_grad():
        whole = model(pixel_values=images).last_hidden_state
        patches = subject.target(model.embeddings(images)).last_hidden_state
    assert torch.equal(whole, patches)


def test_images_that_meet():
    model = vit()
    model.layernorm.register_forward_hook(lambda _, __, out: out - out.mean(0, keepdim=True))
    [found] = saccade.verify(model, checks=["mixing"], isolated=False).errors
    assert "changes by" in found.message and "when batch item 0 changes" in found.message


def test_a_module_is_no_whole_model():
    from saccade.verification.subject._reading import Reading
    from saccade.verification.subject._subject import Subject

    with pytest.raises(Inapplicable, match="not a whole model"):
        list(CHECK.run(Subject(nn.Linear(5, 5), Reading("self", "BLD", 5))))


def test_what_reads_tokens():
    assert takes_tokens(TinyBert())
    assert takes_tokens(Tiny())
    assert not takes_tokens(nn.TransformerEncoderLayer(20, 5, 37))
    assert not takes_tokens(lambda q, k, v: v)


def test_a_model_of_sounds_is_refused():
    config = transformers.WhisperConfig(
        vocab_size=61,
        d_model=20,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=5,
        decoder_attention_heads=5,
        encoder_ffn_dim=37,
        decoder_ffn_dim=37,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=10,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    with pytest.raises(Undecided, match="reads no tokens of a text"):
        token_subject(transformers.WhisperModel(config))


SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 37,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=WORDS, d_model=20, d_kv=4, d_ff=37, num_layers=2, num_heads=5)
    )


def gemma():
    config = transformers.Gemma2Config(**SIZES, num_key_value_heads=5, head_dim=4, query_pre_attn_scalar=9)
    return transformers.Gemma2ForCausalLM(config)


def granite():
    return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SIZES, attention_multiplier=0.3))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


# By the papers and configurations: T5 does not scale, Gemma 2 divides by sqrt(query_pre_attn_scalar) = 3.
@pytest.mark.parametrize(("make", "scale"), [(t5, 1.0), (gemma, 1 / 3), (granite, 0.3), (llama, None)])
def test_what_families_promise_of_their_scale(make, scale):
    assert token_subject(make()).promise.scale == (None if scale is None else pytest.approx(scale))


def test_the_users_promise_wins():
    assert token_subject(t5(), Promise(scale=0.7)).promise.scale == 0.7


def test_a_scale_that_differs_by_layer_is_promised_for_a_layer():
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=20,
        n_head=5,
        n_layer=2,
        n_positions=LONGEST,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    assert promised(model, config, Promise()).scale is None
    assert layer_subject(model.transformer.h[1].attn).promise.scale == pytest.approx(1 / 4)  # 4 ** -0.5 / 2


def test_a_layer_is_given_the_positions_of_its_model():
    model = llama().eval()
    subject = layer_subject(model.model.layers[0].self_attn)
    inputs = subject.inputs(2, 7)
    with torch.no_grad():
        angles = model.model.rotary_emb(inputs["x"], torch.arange(7)[None])
        expected, _ = model.model.layers[0].self_attn(inputs["x"], position_embeddings=angles)
    assert torch.equal(subject(inputs).out, expected)
    assert subject.reading.heads == 5


def test_what_is_no_layer_of_transformers():
    assert layer_subject(nn.Linear(3, 3)) is None
    assert layer_subject(lambda x: x) is None
    assert layer_subject(llama()) is None


# Which line is to blame. What is broken, in which style, and the line.
LINES = {
    "a later token is seen": (HF_DECODER, "cols[None, :] <= rows", "cols[None, :] < 1 + 1 + rows"),
    "positions begin at 0 again": (HF_DECODER, "torch.arange(past, past + input", "torch.arange(0, input"),
    "items meet": (HF_DECODER, "self.ln_f(x))", "self.ln_f(x - x.mean(0)))"),
    "padding is thrown away": (HF_DECODER, "visible = visible & real", "visible & real"),
    "padding is faint": (HF_ENCODER, "torch.finfo(hidden.dtype).min", "-1.0"),
    "another item's keys": (HF_ENCODER, "k.transpose(2, 3)", "k.flip(0).transpose(2, 3)"),
    "the source's padding is lost": (HF_SEQ2SEQ, "visible, memory, source)", "visible, memory, source * 0 == 0)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LINES)
def test_the_line_to_blame(name):
    style, old, new = LINES[name]
    assert style.source.count(old) == 1
    source = style.source.replace(old, new)
    with harness.loaded(source, "whole") as names:
        found = [finding for finding in findings(harness.made(names, style.target)) if finding.severity == "error"]
    assert found and found[0].location is not None
    assert new in found[0].location.code
